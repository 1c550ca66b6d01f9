"""The text to calibrate on: documents, cut into pieces of tokens, some of them held out."""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import TOKENIZER_NAME

CONTINUATION_LEN = 64
# Shorter pieces say little about a context.
_MIN_PIECE_LEN = 32
# At most this share of few documents is held out, and of one document.
_MAX_HELD_OUT = 1 / 3
_HELD_OUT_OF_ONE = 1 / 5


@dataclass(frozen=True)
class Piece:
    """A context and what follows it, in tokens. `prefix` are the special tokens that every text of the model has."""

    prefix: tuple[int, ...]
    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        """All of it."""
        return [*self.prefix, *self.context, *self.continuation]


@dataclass(frozen=True)
class Corpus:
    """What to fit on and what to check on. No document is in both, unless there is only one."""

    name: str
    sha256: str
    fit: tuple[Piece, ...]
    held_out: tuple[Piece, ...]

    @property
    def num_fit_tokens(self) -> int:
        """Tokens of the pieces to fit on."""
        return sum(len(piece.token_ids) for piece in self.fit)


@dataclass(frozen=True)
class CorpusSize:
    """How much text is wanted: tokens to fit on, pieces to hold out, tokens of each piece's context."""

    num_tokens: int
    num_held_out: int
    context_len: int
    max_len: int | None = None


def read_documents(path: Path, fields: tuple[str, ...] = ("text", "prompt", "answer")) -> list[str]:
    """The texts of a file: one of a .txt, one a line of a .jsonl (a string, or an object's `fields` joined).

    Raises UsageError where the file cannot be read.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {path}: cannot be read as UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [content]
    lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
    return [_text_of(line, fields, f"--data {path}, line {number}") for number, line in lines]


def _text_of(line: str, fields: tuple[str, ...], origin: str) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{origin}: not JSON ({error})") from error
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict):
        parts = [entry.get(key) for key in fields]
        texts = [part for part in parts if isinstance(part, str)]
        if texts:
            return "".join(texts)
    raise UsageError(f"{origin}: expected a string, or an object with text, or with prompt and answer")


def load_tokenizer(checkpoint: Checkpoint) -> tokenizers.Tokenizer:
    """The checkpoint's tokenizer. Raises UsageError where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint.save_tokenizer(Path(folder)) is None:
            raise UsageError(f"{checkpoint.source.name}: has no tokenizer, so text cannot be read; use --data self")
        tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(Path(folder) / TOKENIZER_NAME))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def text_corpus(path: Path, tokenizer: tokenizers.Tokenizer, size: CorpusSize) -> Corpus:
    """Cut a file's documents into pieces. Raises UsageError where there is too little text to hold any out."""
    documents = read_documents(path)
    prefix = tuple(tokenizer.encode("").ids)
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids[: size.max_len] for text in documents]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return make_corpus(path.name, digest, tokens, prefix, size)


def make_corpus(
    name: str, sha256: str, documents: list[list[int]], prefix: tuple[int, ...], size: CorpusSize
) -> Corpus:
    """Divide documents into those to fit on and those to hold out, and cut both into pieces.

    One document is divided itself: its end is held out. Raises UsageError where either side is empty.
    """
    cut = [list(_cut(document, prefix, size.context_len)) for document in documents]
    cut = [pieces for pieces in cut if pieces]
    if len(cut) == 1:
        start = len(cut[0]) - max(int(len(cut[0]) * _HELD_OUT_OF_ONE), 1)
        cut = [cut[0][:start], cut[0][start:]]
    # Spread evenly: files are often sorted.
    count = max(min(size.num_held_out, int(len(cut) * _MAX_HELD_OUT)), 1)
    chosen = {(2 * index + 1) * len(cut) // (2 * count) for index in range(count)}
    held_out = [pieces for index, pieces in enumerate(cut) if index in chosen]
    fit = [piece for index, pieces in enumerate(cut) if index not in chosen for piece in pieces]
    corpus = Corpus(name, sha256, _spread(fit, size.num_tokens), _best(held_out, size.num_held_out))
    if not corpus.fit or not corpus.held_out:
        num_pieces = sum(map(len, cut))
        raise UsageError(
            f"--data {name}: too little text ({num_pieces} pieces of at least {_MIN_PIECE_LEN} tokens); expected "
            "enough to fit on some and check on others, some thousand tokens at least, or --data self"
        )
    return corpus


def _cut(document: list[int], prefix: tuple[int, ...], context_len: int) -> Iterator[Piece]:
    length = context_len + CONTINUATION_LEN
    for start in range(0, len(document), length):
        tokens = document[start : start + length]
        if len(tokens) >= _MIN_PIECE_LEN:
            # A short piece's continuation is a quarter of it, and never more than a whole one's.
            end = max(len(tokens) - CONTINUATION_LEN, min(context_len, len(tokens) - len(tokens) // 4))
            yield Piece(prefix, tuple(tokens[:end]), tuple(tokens[end:]))


def _spread(pieces: list[Piece], num_tokens: int) -> tuple[Piece, ...]:
    """About that many tokens of pieces, from everywhere."""
    share = min(num_tokens / max(sum(len(piece.token_ids) for piece in pieces), 1), 1)
    return tuple(piece for index, piece in enumerate(pieces) if int((index + 1) * share) > int(index * share))


def _best(documents: list[list[Piece]], count: int) -> tuple[Piece, ...]:
    """Pieces with the most context, from as many documents as there are."""
    by_length = [sorted(pieces, key=lambda piece: -len(piece.context)) for pieces in documents]
    ranked = sorted(
        (rank, -len(piece.context), index)
        for index, pieces in enumerate(by_length)
        for rank, piece in enumerate(pieces)
    )
    return tuple(by_length[index][rank] for rank, _, index in ranked[:count])
