"""The header of a safetensors file: 8 bytes of length, then JSON that says where every tensor lies."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.errors import EngineError

ALIGNMENT = 64
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
}  # fmt: skip
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_GIT_LFS = b"version "


@dataclass(frozen=True)
class TensorSpan:
    """One tensor's place. `begin` counts from the start of the file when read, of the data when written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def align(position: int) -> int:
    """The next position at which a tensor may begin."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def read_header(path: Path) -> tuple[TensorSpan, ...]:
    """Every tensor of a file, in the file's order.

    Raises EngineError where the file is truncated or its header is damaged.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if start == _GIT_LFS:
            raise EngineError(f"{path}: a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`")
        header_bytes = int.from_bytes(start, "little")
        data_start = _LENGTH_BYTES + header_bytes
        if len(start) < _LENGTH_BYTES or data_start > file_bytes:
            raise EngineError(
                f"{path}: truncated: its header should end at byte {data_start}, the file has {file_bytes} bytes; "
                "fetch the file again"
            )
        content = file.read(header_bytes)
    entries = _parse(content, path)
    spans = [_span(path, name, entry, data_start, file_bytes) for name, entry in entries.items()]
    spans.sort(key=lambda span: span.begin)
    for before, after in pairwise(spans):
        if after.begin < before.begin + before.num_bytes:
            raise EngineError(f"{path}: damaged header: {before.name} and {after.name} overlap; fetch the file again")
    return tuple(spans)


def encode_header(spans: Sequence[TensorSpan]) -> bytes:
    """Length and JSON for these tensors, in order of `begin`, such that the data starts aligned.

    The format allows no holes, so the gaps that alignment leaves are written as named padding.
    """
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for span in spans:
        if gap := span.begin - position:
            entries[f"__padding__.{position}"] = {
                "dtype": "U8", "shape": [gap], "data_offsets": [position, span.begin]
            }  # fmt: skip
        position = span.begin + span.num_bytes
        entries[span.name] = {
            "dtype": span.dtype, "shape": list(span.shape), "data_offsets": [span.begin, position]
        }  # fmt: skip
    content = json.dumps(entries, separators=(",", ":")).encode()
    padded = align(_LENGTH_BYTES + len(content)) - _LENGTH_BYTES
    return padded.to_bytes(_LENGTH_BYTES, "little") + content.ljust(padded)


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise EngineError(f"{path}: damaged header: {twice} occurs twice; fetch the file again")
        return entries

    try:
        entries = json.loads(content, object_pairs_hook=unique)
    except ValueError as error:
        raise EngineError(f"{path}: damaged header: not JSON ({reason(error)}); fetch the file again") from error
    if not isinstance(entries, dict):
        raise EngineError(f"{path}: damaged header: expected a JSON object; fetch the file again")
    return {name: entry for name, entry in entries.items() if name != _METADATA}


def _span(path: Path, name: str, entry: Any, data_start: int, file_bytes: int) -> TensorSpan:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, end = (data_start + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{path}: damaged header: tensor {name} is not described; fetch the file again") from error
    if dtype not in ITEM_BYTES:
        raise EngineError(f"{path}: tensor {name} has unknown dtype {dtype}; expected one of {', '.join(ITEM_BYTES)}")
    if end > file_bytes:
        raise EngineError(
            f"{path}: truncated: tensor {name} should end at byte {end}, the file has {file_bytes} bytes; "
            "fetch the file again"
        )
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if begin < data_start or end - begin != expected:
        raise EngineError(
            f"{path}: damaged header: tensor {name} has {end - begin} bytes, its shape needs {expected}; "
            "fetch the file again"
        )
    return TensorSpan(name, dtype, shape, begin, end - begin)
