"""Text into pieces: by document, held out evenly, with the prefix on every piece."""

import json
from pathlib import Path

import pytest

from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, CorpusSize, make_corpus, read_documents
from pop_engine.configs.errors import UsageError

SIZE = CorpusSize(num_tokens=10_000, num_held_out=3, context_len=100)
LENGTH = SIZE.context_len + CONTINUATION_LEN


def documents(count: int, length: int) -> list[list[int]]:
    """Token ids that name their document."""
    return [[index] * length for index in range(count)]


def test_no_document_is_on_both_sides() -> None:
    corpus = make_corpus("data", "", documents(12, 2 * LENGTH + 40), (7, 8), SIZE)
    fit, held_out = ({piece.context[0] for piece in side} for side in (corpus.fit, corpus.held_out))
    assert fit
    assert len(held_out) == 3
    assert not fit & held_out
    assert max(held_out) - min(held_out) > 4, "held out from one end of the file"


def test_every_piece_has_the_prefix_and_its_length() -> None:
    corpus = make_corpus("data", "", documents(9, LENGTH), (7, 8), SIZE)
    for piece in (*corpus.fit, *corpus.held_out):
        assert piece.prefix == (7, 8)
        assert (len(piece.context), len(piece.continuation)) == (SIZE.context_len, CONTINUATION_LEN)
        assert piece.token_ids == [7, 8, *piece.context, *piece.continuation]


def test_a_short_piece_has_a_short_continuation_and_a_shorter_one_is_dropped() -> None:
    corpus = make_corpus("data", "", [[1] * 40, [2] * 31, [3] * 40], (), SIZE)
    assert [len(piece.continuation) for piece in (*corpus.fit, *corpus.held_out)] == [10, 10]


def test_the_end_of_a_single_document_is_held_out() -> None:
    corpus = make_corpus("data", "", [list(range(10 * LENGTH))], (), SIZE)
    assert max(piece.continuation[-1] for piece in corpus.fit) < min(piece.context[0] for piece in corpus.held_out)
    assert (len(corpus.fit), len(corpus.held_out)) == (8, 2)


def test_the_fit_takes_about_as_many_tokens_as_wanted_from_everywhere() -> None:
    size = CorpusSize(num_tokens=20 * LENGTH, num_held_out=3, context_len=100)
    corpus = make_corpus("data", "", documents(100, LENGTH), (), size)
    assert abs(corpus.num_fit_tokens - size.num_tokens) <= LENGTH
    chosen = [piece.context[0] for piece in corpus.fit]
    assert min(chosen) < 10
    assert max(chosen) > 90


@pytest.mark.parametrize("texts", [[], [[1] * 20], [[1] * LENGTH]], ids=["none", "short", "one piece"])
def test_too_little_text_is_refused(texts: list[list[int]]) -> None:
    with pytest.raises(UsageError, match="--data data: too little text"):
        make_corpus("data", "", texts, (), SIZE)


def test_documents_of_a_file(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    text.write_text("one\n\ntwo", encoding="utf-8")
    entries = ["plain", {"text": "of an object", "origin": "x"}, {"prompt": "a question, ", "answer": "an answer"}]
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    assert read_documents(text) == ["one\n\ntwo"]
    assert read_documents(lines) == ["plain", "of an object", "a question, an answer"]


@pytest.mark.parametrize("line", ["{", "3", '{"texts": "x"}', '{"text": 3}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f'"good"\n{line}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"bad\.jsonl, line 2: (not JSON|expected a string)"):
        read_documents(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: cannot be read"):
        read_documents(tmp_path / "gone.txt")
