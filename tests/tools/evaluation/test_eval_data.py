"""Lines to tokens: what is the prompt, what the answer, what is refused and how."""

import dataclasses
import json
from pathlib import Path

import pytest

from engine_kit import MAX_SEQ_LEN, SMALL, TinyModels
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.evaluation.data import Document, EncodeOptions, encode_examples, read_examples
from pop_engine.tools.evaluation.pair import check_pair
from pop_engine.tools.evaluation.text import EvalText

OPTIONS = EncodeOptions(context_len=None, max_tokens=8, max_seq_len=MAX_SEQ_LEN, chat=False)


@pytest.fixture(scope="module")
def directory(tiny: TinyModels) -> Path:
    return tiny.directory((SMALL, 0), "one-pass")


@pytest.fixture(scope="module")
def text(directory: Path) -> EvalText:
    return EvalText(directory, Manifest.load(directory).tokenizer)


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def encoded(tmp_path: Path, text: EvalText, line: object, **changes: object) -> Document:
    options = dataclasses.replace(OPTIONS, **changes)  # type: ignore[arg-type]
    (document,) = encode_examples(read_examples(write(tmp_path / "data.jsonl", line), None), text, options)
    return document


def test_a_prompt_and_its_answer(tmp_path: Path, text: EvalText) -> None:
    document = encoded(tmp_path, text, {"prompt": "the cat", "answer": " sat on the mat"})
    assert document.answer is not None
    assert [*document.prompt, *document.answer] == text.encode("the cat sat on the mat")
    assert document.prompt == tuple(text.encode("the cat"))
    assert document.without_context == document.prompt[-1:]


def test_an_answer_keeps_its_own_tokens_where_they_would_merge_with_the_prompt(tmp_path: Path, text: EvalText) -> None:
    """`ca` + `t` is one token of the tiny vocabulary, and three letters are not what follows this prompt."""
    document = encoded(tmp_path, text, {"prompt": "the c", "answer": "at"})
    assert text.encode("the cat")[: len(document.prompt)] != list(document.prompt)
    assert document.answer == tuple(text.encode_plain("at"))


def test_a_chat_is_wrapped_in_the_template(tmp_path: Path, text: EvalText) -> None:
    document = encoded(tmp_path, text, {"prompt": "hat", "answer": "mat"}, chat=True, max_tokens=1)
    assert document.prompt == tuple(text.encode_chat("hat"))
    assert document.without_context == tuple(text.encode_chat(""))
    assert document.answer == tuple(text.encode_plain("mat")[:1])


def test_a_prompt_keeps_its_last_tokens(tmp_path: Path, text: EvalText) -> None:
    document = encoded(tmp_path, text, {"prompt": "the cat sat on the mat"}, context_len=3)
    assert len(document.prompt) == 3
    assert "the cat sat on the mat".endswith(document.prompt_text)
    assert document.answer is None


def test_a_running_text_is_cut_into_context_and_answer(tmp_path: Path, text: EvalText) -> None:
    whole = "the cat sat on the mat and then the other cat ran to the hat"
    document = encoded(tmp_path, text, {"text": whole, "origin": "somewhere"}, context_len=6, max_tokens=4)
    tokens = tuple(text.encode(whole))
    assert (document.prompt, document.answer) == (tokens[:6], tokens[6:10])
    assert document.without_context == tokens[5:6]
    short = encoded(tmp_path, text, {"text": whole}, context_len=1000)
    assert short.answer is not None
    assert short.prompt + short.answer == tokens
    assert len(short.answer) == len(tokens) // 4


def test_the_first_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt": "a"}, "", {"prompt": "b\u2028c"}, {"prompt": "d"})
    data = read_examples(path, 2)
    assert [(example.line, example.text) for example in data.examples] == [(1, "a"), (3, "b\u2028c")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", "line 2: not a JSON object"),
        ({"answer": "x"}, "line 2: expected either prompt .* or text"),
        ({"prompt": "x", "text": "y"}, "line 2: expected either prompt .* or text"),
        ({"prompt": "  "}, "line 2: expected a non-empty text as prompt, found '  '"),
        ({"prompt": 3}, "line 2: expected a non-empty text as prompt, found 3"),
        ({"text": "x", "answer": "y"}, "line 2: expected a text as answer, beside a prompt"),
        ({"prompt": "x", "answer": 1}, "line 2: expected a text as answer"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "data.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(UsageError, match=f"--data .*data.jsonl, {message}"):
        read_examples(path, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x", "answer": ""}, "line 1: answer '' has no tokens"),
        ({"text": "x"}, "line 1: text of 1 tokens; expected at least two"),
        ({"prompt": "z" * 41}, "line 1: 41 prompt tokens and 8 of the answer, .* max_seq_len 48; give --context-len"),
        ({"prompt": "z" * 41, "answer": "q"}, "line 1: 41 prompt tokens and 8 of the answer"),
    ],
)
def test_what_cannot_be_scored(tmp_path: Path, text: EvalText, line: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encoded(tmp_path, text, line)


def test_files_that_are_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing.jsonl: cannot be read \(No such file"):
        read_examples(tmp_path / "missing.jsonl", None)
    with pytest.raises(UsageError, match="empty; expected lines such as"):
        read_examples(write(tmp_path / "empty.jsonl", "  "), None)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(UsageError, match=r"byte 15 \(0xe9\) is not UTF-8"):
        read_examples(tmp_path / "latin.jsonl", None)


def test_an_engine_without_a_tokenizer(directory: Path) -> None:
    with pytest.raises(UsageError, match="has no tokenizer, so text cannot be evaluated"):
        EvalText(directory, None)


def test_engines_that_are_no_pair(directory: Path) -> None:
    full = Manifest.load(directory)
    assert full.weights is not None
    check_pair("pop", full, "full", full)
    (file,) = full.weights.files
    copy = dataclasses.replace(full.weights, mode="copy", files=(dataclasses.replace(file, sha256="0"),))
    other_weights = dataclasses.replace(full.weights, files=(dataclasses.replace(file, sha256="0"),))
    check_pair("pop", full, "full", dataclasses.replace(full, weights=copy))
    other_tokenizer = tuple(
        dataclasses.replace(record, sha256="0") if record.path == "tokenizer.json" else record for record in full.files
    )
    for changes, message in (
        ({"plan": dataclasses.replace(full.plan, num_tail_layers=1)}, "has 1 tail layers; expected a full engine"),
        ({"dims": dataclasses.replace(full.dims, vocab_size=7)}, "its dimensions differ from those of pop"),
        ({"files": other_tokenizer}, "its tokenizer differ"),
        ({"weights": other_weights}, "its weights differ"),
    ):
        with pytest.raises(UsageError, match=f"^--against full: {message}"):
            check_pair("pop", full, "full", dataclasses.replace(full, **changes))
