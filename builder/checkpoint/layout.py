"""Where every weight lies on disk, decided before anything is written."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import get_args

from pop_engine.builder.checkpoint.checkpoint import Checkpoint, StoredTensor
from pop_engine.builder.checkpoint.safetensors_header import ALIGNMENT, ITEM_BYTES, TensorSpan, align, encode_header
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, WEIGHTS_DIRECTORY, DType, WeightsMode

SAFETENSORS_DTYPES: dict[DType, str] = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_MAX_SHARD_BYTES = 5_000_000_000
_BASE_PREFIX = "model."


@dataclass(frozen=True)
class WeightEntry:
    """One parameter's place. `file` is a bare name in the layout's directory, `stored_name` the checkpoint's name."""

    file: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    stored_name: str


@dataclass(frozen=True)
class WeightLayout:
    """The one copy of the weights. `directory` is below the engine directory, or absolute when referenced.

    The file of calibrated weights is always the engine's own, whatever the mode.
    """

    mode: WeightsMode
    directory: str
    dtype: DType
    entries: dict[str, WeightEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def is_calibrated(self) -> bool:
        """Whether it has calibrated weights beside the checkpoint's."""
        return any(entry.file == CALIBRATED_WEIGHTS for entry in self.entries.values())

    def path(self, engine: Path, file: str) -> Path:
        """Where one of its files lies, for an engine directory."""
        # Joining keeps a referenced folder as it is: it is absolute.
        return engine / (WEIGHTS_DIRECTORY if file == CALIBRATED_WEIGHTS else self.directory) / file

    def with_calibration(self, shapes: Mapping[str, tuple[int, ...]]) -> "WeightLayout":
        """This layout and a file of calibrated weights."""
        added = _copy_layout(shapes, {CALIBRATED_WEIGHTS: [*shapes]}, {name: name for name in shapes}, self.dtype)
        return replace(self, entries=self.entries | added.entries)

    def by_file(self) -> dict[str, dict[str, WeightEntry]]:
        """Entries of each file, in the order in which they lie there."""
        ordered = sorted(self.entries.items(), key=lambda item: (item[1].file, item[1].offset))
        files: dict[str, dict[str, WeightEntry]] = {}
        for name, entry in ordered:
            files.setdefault(entry.file, {})[name] = entry
        return files


def plan_weights(
    parameters: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    dtype: DType,
    mode: WeightsMode | None,
    staging_parent: Path,
) -> WeightLayout:
    """Place every parameter. Mode None links where that is possible and copies where it is not.

    `staging_parent` is an existing folder on the file system that the engine will be on. Without weights the layout
    is the one that copying would give.
    Raises EngineError where a tensor is missing or has another shape, UsageError where the mode is not possible.
    """
    if mode is not None and mode not in get_args(WeightsMode):
        raise UsageError(f"--weights {mode}: expected one of {', '.join(get_args(WeightsMode))}")
    if checkpoint.tensors is None:
        if mode in ("link", "reference"):
            raise UsageError(f"--weights {mode}: there are no weights to {mode}; leave --weights out")
        sizes = {name: _num_bytes(shape, dtype) for name, shape in parameters.items()}
        return _copy_layout(parameters, _split_by_size(sizes), {name: name for name in parameters}, dtype)
    stored = match_tensors(parameters, checkpoint.tensors, checkpoint.source.location)
    obstacle = _obstacle_to_sharing(stored, dtype)
    if mode == "reference":
        return _shared_layout("reference", str(_only_folder(stored, obstacle)), stored, dtype)
    obstacle = obstacle or _obstacle_to_linking(stored, staging_parent)
    if mode == "link" and obstacle:
        raise UsageError(f"--weights link: {obstacle}; use --weights copy")
    if mode == "link" or (mode is None and not obstacle):
        return _shared_layout("link", WEIGHTS_DIRECTORY, stored, dtype)
    return _copy_layout(parameters, _own_shards(stored, dtype), {n: s.name for n, s in stored.items()}, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    return prod(shape) * ITEM_BYTES[SAFETENSORS_DTYPES[dtype]]


def match_tensors(
    parameters: Mapping[str, tuple[int, ...]], tensors: Mapping[str, StoredTensor], location: str
) -> dict[str, StoredTensor]:
    """Each parameter's stored tensor. Raises EngineError where one is missing or has another shape."""
    found = {name: _find(name, tensors) for name in parameters}
    missing = [name for name, tensor in found.items() if tensor is None]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise EngineError(
            f"{location}: no tensor for parameter {missing[0]}{more}; the checkpoint is incomplete or of another model"
        )
    stored = {name: tensor for name, tensor in found.items() if tensor is not None}
    for name, tensor in stored.items():
        if tensor.shape != tuple(parameters[name]):
            raise EngineError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, config.json makes it "
                f"{list(parameters[name])}; the two are not of the same model"
            )
    return stored


def _find(name: str, tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """A parameter's tensor, also where the checkpoint was saved from the base model or wrapped once more."""
    without_base = name.partition(".")[2]
    names = (name, without_base, _BASE_PREFIX + name)
    return next((tensors[candidate] for candidate in names if candidate in tensors), None)


def _obstacle_to_sharing(stored: Mapping[str, StoredTensor], dtype: DType) -> str | None:
    for tensor in stored.values():
        if tensor.file.suffix != ".safetensors":
            return f"{tensor.file.name} is not a safetensors file, so its weights must be converted"
        if tensor.dtype != SAFETENSORS_DTYPES[dtype]:
            return f"tensor {tensor.name} is stored as {tensor.dtype} and the engine is {dtype}"
    return None


def _obstacle_to_linking(stored: Mapping[str, StoredTensor], staging_parent: Path) -> str | None:
    device = staging_parent.stat().st_dev
    for file in {tensor.file for tensor in stored.values()}:
        found = file.stat()
        if found.st_dev != device:
            return f"{file} and {staging_parent} are on different file systems"
        # Linux refuses hard links to files of others that one may not write (fs.protected_hardlinks).
        if found.st_uid != os.geteuid() and not os.access(file, os.R_OK | os.W_OK):
            return f"{file} belongs to another user and may not be hard-linked"
    return None


def _only_folder(stored: Mapping[str, StoredTensor], obstacle: str | None) -> Path:
    folders = sorted({tensor.file.resolve().parent for tensor in stored.values()})
    if obstacle is None and len(folders) > 1:
        obstacle = f"the files lie in several folders ({folders[0]}, {folders[1]})"
    if obstacle is not None:
        raise UsageError(f"--weights reference: {obstacle}; use --weights copy")
    return folders[0]


def _shared_layout(mode: WeightsMode, directory: str, stored: Mapping[str, StoredTensor], dtype: DType) -> WeightLayout:
    """Entries at the places that the tensors already have. A referenced file goes by its real name."""
    entries = {
        name: WeightEntry(
            file=tensor.file.resolve().name if mode == "reference" else tensor.file.name,
            offset=tensor.offset,
            num_bytes=tensor.num_bytes,
            shape=tensor.shape,
            stored_name=tensor.name,
        )
        for name, tensor in stored.items()
    }
    return WeightLayout(mode, directory, dtype, entries)


def _own_shards(stored: Mapping[str, StoredTensor], dtype: DType) -> dict[str, list[str]]:
    if any(tensor.file.suffix != ".safetensors" for tensor in stored.values()):
        return _split_by_size({name: _num_bytes(tensor.shape, dtype) for name, tensor in stored.items()})
    shards: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        shards.setdefault(tensor.file.name, []).append(name)
    return shards


def _split_by_size(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, num_bytes in sizes.items():
        if shards[-1] and filled + num_bytes > _MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _copy_layout(
    parameters: Mapping[str, tuple[int, ...]],
    shards: Mapping[str, list[str]],
    stored_names: Mapping[str, str],
    dtype: DType,
) -> WeightLayout:
    entries: dict[str, WeightEntry] = {}
    for file, names in shards.items():
        # Sizes that keep the alignment go first: padding is then rare.
        ordered = sorted(names, key=lambda name: _num_bytes(parameters[name], dtype) % ALIGNMENT != 0)
        spans: list[TensorSpan] = []
        position = 0
        for name in ordered:
            shape = tuple(parameters[name])
            spans.append(TensorSpan(name, SAFETENSORS_DTYPES[dtype], shape, position, _num_bytes(shape, dtype)))
            position = align(position + spans[-1].num_bytes)
        data_start = len(encode_header(spans))
        for span in spans:
            stored_name = stored_names[span.name]
            entries[span.name] = WeightEntry(file, data_start + span.begin, span.num_bytes, span.shape, stored_name)
    return WeightLayout("copy", WEIGHTS_DIRECTORY, dtype, {name: entries[name] for name in parameters})
