"""The one copy of the weights, on disk: found and checked before anything loads."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, WEIGHTS_DIRECTORY, FileRecord, Manifest, file_sha256

# A safetensors file begins with the length of its JSON header.
_HEADER_LENGTH_BYTES = 8


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
    content = np.memmap(path, mode="r")
    start = _HEADER_LENGTH_BYTES + int.from_bytes(content[:_HEADER_LENGTH_BYTES].tobytes(), "little")
    header = json.loads(content[_HEADER_LENGTH_BYTES:start].tobytes())
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, entry in header.items():
        # What is left out is padding and metadata.
        if entry.get("dtype") == "F32":
            begin, end = (start + offset for offset in entry["data_offsets"])
            tensors[name] = content[begin:end].view(np.float32).reshape(entry["shape"])
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
