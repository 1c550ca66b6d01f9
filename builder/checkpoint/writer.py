"""Weights onto disk, in one streaming pass that also checks and hashes them."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from pop_engine.builder.checkpoint.checkpoint import Checkpoint, StoredTensor
from pop_engine.builder.checkpoint.layout import SAFETENSORS_DTYPES, WeightEntry, WeightLayout
from pop_engine.builder.checkpoint.safetensors_header import TensorSpan, encode_header
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, WEIGHTS_DIRECTORY, DType, FileRecord, WeightsRecord

Progress = Callable[[int, int], None]

_TORCH_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Conversion and checks run block by block, so that beside the stored tensor only one block is in memory.
_BLOCK_ITEMS = 1 << 22
_READ_BYTES = 1 << 22


class _Hash(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass
class _Meter:
    """Counts bytes for the caller's progress display."""

    progress: Progress
    total: int
    done: int = field(default=0)

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.progress(self.done, self.total)


def write_weights(
    layout: WeightLayout,
    checkpoint: Checkpoint,
    directory: Path,
    progress: Progress,
    calibrated: Mapping[str, StoredTensor] | None = None,
) -> WeightsRecord:
    """Put the layout into the engine directory and record its files; `progress` gets bytes done and bytes in all.

    `calibrated` are the tensors of the layout that are not the checkpoint's.

    Raises EngineError where a tensor holds NaN or infinity or its file is damaged, UsageError where a link is
    refused. A full disk is an OSError.
    """
    if checkpoint.tensors is None:
        raise UsageError(f"{checkpoint.source.name}: opened without weights, there is nothing to write")
    tensors = {**checkpoint.tensors, **(calibrated or {})}
    meter = _Meter(progress, layout.num_bytes)
    files: list[FileRecord] = []
    for name, entries in layout.by_file().items():
        mode = "copy" if name == CALIBRATED_WEIGHTS else layout.mode
        path = layout.path(directory, name)
        stored = {parameter: tensors[entry.stored_name] for parameter, entry in entries.items()}
        if mode != "reference":
            path.parent.mkdir(exist_ok=True)
        if mode == "copy":
            sha256 = _copy(path, entries, stored, layout.dtype, meter)
        else:
            if mode == "link":
                _link(next(iter(stored.values())).file, path)
            sha256 = _check(path, entries, stored, meter)
        record_path = str(path) if mode == "reference" else f"{WEIGHTS_DIRECTORY}/{name}"
        files.append(FileRecord(record_path, path.stat().st_size, sha256))
    return WeightsRecord(layout.mode, layout.directory, layout.dtype, layout.num_bytes, tuple(files))


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source.resolve(), path)
    except FileExistsError:
        raise
    except OSError as error:
        raise UsageError(f"--weights link: {source} cannot be linked ({error.strerror}); use --weights copy") from error


def _copy(
    path: Path, entries: Mapping[str, WeightEntry], stored: Mapping[str, StoredTensor], dtype: DType, meter: _Meter
) -> str:
    digest = hashlib.sha256()
    header = _header(entries, dtype)
    with path.open("xb") as file:
        file.write(header)
        digest.update(header)
        for name, entry in entries.items():
            padding = bytes(entry.offset - file.tell())
            file.write(padding)
            digest.update(padding)
            for block in _blocks(stored[name], _TORCH_DTYPES[dtype]):
                file.write(block)
                digest.update(block)
                meter.advance(block.nbytes)
    return digest.hexdigest()


def _header(entries: Mapping[str, WeightEntry], dtype: DType) -> bytes:
    data_start = min(entry.offset for entry in entries.values())
    spans = [
        TensorSpan(name, SAFETENSORS_DTYPES[dtype], entry.shape, entry.offset - data_start, entry.num_bytes)
        for name, entry in entries.items()
    ]
    return encode_header(spans)


def _check(path: Path, entries: Mapping[str, WeightEntry], stored: Mapping[str, StoredTensor], meter: _Meter) -> str:
    """Check and hash a file that stays as it is: its tensors in order, and the bytes between them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for name, entry in entries.items():
            _hash_until(file.read, entry.offset - file.tell(), digest)
            tensor = stored[name]
            for block in _blocks(tensor, None):
                digest.update(block)
                meter.advance(block.nbytes)
            file.seek(entry.offset + entry.num_bytes)
        _hash_until(file.read, path.stat().st_size - file.tell(), digest)
    return digest.hexdigest()


def _hash_until(read: Callable[[int], bytes], num_bytes: int, digest: _Hash) -> None:
    while num_bytes > 0 and (block := read(min(num_bytes, _READ_BYTES))):
        digest.update(block)
        num_bytes -= len(block)


def _blocks(stored: StoredTensor, dtype: torch.dtype | None) -> Iterator[memoryview]:
    """The tensor's bytes, checked block by block, in another dtype where one is given."""
    for block in torch.split(stored.read().reshape(-1), _BLOCK_ITEMS):
        if not torch.isfinite(block).all():
            raise EngineError(
                f"{stored.file}: tensor {stored.name} holds NaN or infinity; fetch the file again or use another one"
            )
        converted = block if dtype is None else block.to(dtype)
        if converted is not block and not torch.isfinite(converted).all():
            raise EngineError(f"{stored.file}: tensor {stored.name} overflows {dtype}; use --dtype bf16 or fp32")
        yield converted.contiguous().view(torch.uint8).numpy().data
