"""The one copy of the weights, on disk: found and checked before anything loads."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, WEIGHTS_DIRECTORY, FileRecord, Manifest, file_sha256

# A safetensors file begins with the length of its JSON header.
_HEADER_LENGTH_BYTES = 8
_DTYPES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_BASE_PREFIX = "model."


def weights_directory(directory: Path, manifest: Manifest) -> Path:
    """The folder with the weight files, every one of them present and of the recorded size.

    Raises UsageError where the engine was built without weights, EngineError where files are missing or differ.
    """
    record = manifest.weights
    if record is None:
        raise UsageError(f"{directory}: built with --no-weights, so it cannot run; build it without that option")
    for file in record.files:
        _check_size(directory / file.path, file, moved=Path(file.path).is_absolute())
    return directory / record.directory


def own_weights(directory: Path, weights: Path, manifest: Manifest) -> dict[str, NDArray[np.float32]]:
    """The calibrated weights where the others lie elsewhere: a referenced checkpoint's folder stays as it is.

    Mapped, by their names in the graph. Empty where one folder holds them all.
    """
    path = directory / WEIGHTS_DIRECTORY / CALIBRATED_WEIGHTS
    if manifest.calibration is None or path.parent == weights:
        return {}
    # What is left out is padding.
    return {
        name: tensor.content.view(np.float32).reshape(tensor.shape)
        for name, tensor in _map_file(path).items()
        if tensor.dtype == "fp32"
    }


@dataclass(frozen=True)
class MappedTensor:
    """One tensor of a safetensors file; `content` are its bytes, mapped and not read yet."""

    content: NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]


def mapped_weights(directory: Path, manifest: Manifest, bindings: Iterable[Binding]) -> dict[str, MappedTensor]:
    """The bytes of these weights, by the names of their bindings, wherever the checkpoint's files lie.

    Raises EngineError where a weight is missing, or has not the binding's shape and dtype.
    """
    assert manifest.weights is not None, "weights_directory comes first"
    stored: dict[str, MappedTensor] = {}
    for file in manifest.weights.files:
        stored |= _map_file(directory / file.path)
    found: dict[str, MappedTensor] = {}
    for binding in bindings:
        tensor = _find(binding.name, stored)
        if tensor is None:
            raise EngineError(f"{directory}: no weight {binding.name} in its files; build the engine again")
        if (tensor.dtype, tensor.shape) != (binding.dtype, binding.shape):
            raise EngineError(
                f"{directory}: weight {binding.name} is {tensor.dtype} {list(tensor.shape)}, but the plan takes "
                f"{binding.dtype} {list(binding.shape)}; build the engine again"
            )
        found[binding.name] = tensor
    return found


def _find(name: str, stored: Mapping[str, MappedTensor]) -> MappedTensor | None:
    """A parameter's tensor, also where the linked checkpoint was saved from the base model or wrapped once more."""
    names = (name, name.partition(".")[2], _BASE_PREFIX + name)
    return next((stored[candidate] for candidate in names if candidate in stored), None)


def _map_file(path: Path) -> dict[str, MappedTensor]:
    """Every tensor of a safetensors file. Raises EngineError where it is none."""
    content = np.memmap(path, mode="r")
    start = _HEADER_LENGTH_BYTES + int.from_bytes(content[:_HEADER_LENGTH_BYTES].tobytes(), "little")
    try:
        header = json.loads(content[_HEADER_LENGTH_BYTES:start].tobytes())
    except ValueError as error:
        raise EngineError(f"{path}: not a safetensors file ({error}); build the engine again") from error
    tensors: dict[str, MappedTensor] = {}
    for name, entry in header.items():
        dtype = _DTYPES.get(entry.get("dtype", ""))
        if dtype is not None:
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = MappedTensor(content[begin:end], dtype, tuple(entry["shape"]))
    return tensors


def check_graphs(directory: Path, manifest: Manifest) -> None:
    """Raise EngineError unless every file beside the weights is the one that was built."""
    for file in manifest.files:
        path = directory / file.path
        _check_size(path, file, moved=False)
        if file_sha256(path) != file.sha256:
            raise EngineError(f"{path}: changed since it was built (its SHA-256 differs); build the engine again")


def _check_size(path: Path, file: FileRecord, *, moved: bool) -> None:
    if not path.is_file():
        fix = "the checkpoint it refers to has moved: put it back or build again" if moved else "build the engine again"
        raise EngineError(f"{path}: missing; {fix}")
    if path.stat().st_size != file.num_bytes:
        raise EngineError(
            f"{path}: {path.stat().st_size} bytes, but the manifest says {file.num_bytes}; build the engine again"
        )
