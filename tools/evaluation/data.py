"""The documents of an evaluation: a JSONL file, read and turned into tokens, each line checked."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.requests import decode_utf8
from pop_engine.tools.evaluation.text import EvalText

# Of a `text`, this much is context where --context-len is not given.
_DEFAULT_CONTEXT_LEN = 512
# A shorter text still gives this share of itself to the answer.
_MIN_ANSWER_SHARE = 1 / 4


@dataclass(frozen=True)
class Example:
    """One line: a prompt with or without an answer, or a running text, of which the first part is the prompt."""

    origin: str
    line: int
    text: str
    answer: str | None
    is_running_text: bool


@dataclass(frozen=True)
class EvalData:
    """All lines of a file, or the first of them."""

    name: str
    sha256: str
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Document:
    """One line in tokens. Without an answer, the full model's greedy one takes its place.

    `without_context` is what the model reads when it is not shown the prompt: the chat template around nothing, or
    the special tokens and the prompt's last token (as in builder/analysis/benefit.py).
    """

    line: int
    prompt_text: str
    prompt: tuple[int, ...]
    without_context: tuple[int, ...]
    answer: tuple[int, ...] | None


@dataclass(frozen=True)
class EncodeOptions:
    """How lines become tokens. `context_len` cuts a prompt to its last tokens, a running text to its first."""

    context_len: int | None
    max_tokens: int
    max_seq_len: int
    chat: bool


def read_examples(path: Path, limit: int | None) -> EvalData:
    """The lines of a .jsonl file. Raises UsageError where it cannot be read, and naming the line that is wrong."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data {path}: cannot be read ({error.strerror}); give a .jsonl file") from error
    # Not splitlines: JSON strings may hold the other separators that it knows.
    lines = decode_utf8(content, f"--data {path}").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise UsageError(f'--data {path}: empty; expected lines such as {{"prompt": "…", "answer": "…"}}')
    examples = tuple(_parse(line, f"--data {path}, line {number}", number) for number, line in numbered)
    return EvalData(path.name, hashlib.sha256(content).hexdigest(), examples)


def _parse(line: str, origin: str, number: int) -> Example:
    try:
        given = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise UsageError(f"{origin}: not a JSON object ({error})") from error
    if ("prompt" in given) == ("text" in given):
        raise UsageError(f"{origin}: expected either prompt (with or without answer) or text, a running text")
    key = "prompt" if "prompt" in given else "text"
    text, answer = given[key], given.get("answer")
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"{origin}: expected a non-empty text as {key}, found {text!r}")
    if answer is not None and (key == "text" or not isinstance(answer, str)):
        raise UsageError(f"{origin}: expected a text as answer, beside a prompt, found {answer!r}")
    return Example(origin, number, text, answer if isinstance(answer, str) else None, key == "text")


def encode_examples(data: EvalData, text: EvalText, options: EncodeOptions) -> list[Document]:
    """Every line in tokens. Raises UsageError for an answer without tokens, and for what the engine cannot hold."""
    documents = [
        (_encode_running_text if example.is_running_text else _encode_prompt)(example, text, options)
        for example in data.examples
    ]
    for example, document in zip(data.examples, documents, strict=True):
        _check_room(example.origin, document, options)
    return documents


def _encode_prompt(example: Example, text: EvalText, options: EncodeOptions) -> Document:
    shown = example.text if options.context_len is None else text.last_tokens(example.text, options.context_len)
    if options.chat and text.has_chat_template:
        prompt, without_context = text.encode_chat(shown), text.encode_chat("")
        answer = None if example.answer is None else text.encode_plain(example.answer)
    else:
        prompt = text.encode(shown)
        without_context = [*text.prefix, *prompt[-1:]]
        answer = None if example.answer is None else text.encode_answer(shown, example.answer)
    if answer is not None and not answer:
        raise UsageError(f"{example.origin}: answer {example.answer!r} has no tokens; leave it out, or give some text")
    if not prompt:
        raise UsageError(f"{example.origin}: prompt {shown!r} has no tokens; give some text")
    cut = None if answer is None else tuple(answer[: options.max_tokens])
    return Document(example.line, shown, tuple(prompt), tuple(without_context), cut)


def _encode_running_text(example: Example, text: EvalText, options: EncodeOptions) -> Document:
    tokens, prefix = text.encode_plain(example.text), text.prefix
    if len(tokens) < 2:
        raise UsageError(f"{example.origin}: text of {len(tokens)} tokens; expected at least two, context and answer")
    least = max(min(options.max_tokens, int(len(tokens) * _MIN_ANSWER_SHARE)), 1)
    end = min(options.context_len or _DEFAULT_CONTEXT_LEN, len(tokens) - least)
    context, answer = tokens[:end], tokens[end : end + options.max_tokens]
    return Document(
        example.line, text.decode(context), (*prefix, *context), (*prefix, context[-1]), tuple(answer)
    )  # fmt: skip


def _check_room(origin: str, document: Document, options: EncodeOptions) -> None:
    answer_len = options.max_tokens if document.answer is None else len(document.answer)
    # Greedy answers are generated for every document, however short the one to score is.
    needed = len(document.prompt) + max(answer_len, options.max_tokens)
    if needed > options.max_seq_len:
        raise UsageError(
            f"{origin}: {len(document.prompt)} prompt tokens and {needed - len(document.prompt)} of the answer, but "
            f"the engine holds max_seq_len {options.max_seq_len}; give --context-len or a smaller --max-tokens, or "
            "build with a higher --max-seq-len"
        )
