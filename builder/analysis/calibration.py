"""A calibration on disk: what pop-calibrate writes and pop-build reads."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pop_engine.builder.checkpoint.checkpoint import Checkpoint, StoredTensor
from pop_engine.configs.calibration import CALIBRATION_NAME, CalibrationRecord
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import file_sha256
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.whole_file import write_json

TENSORS_NAME = "calibration.safetensors"
_FORMAT_VERSION = 1
# Of each tensor, this many bytes tell two models apart.
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class CalibratedModel:
    """The model, and the tail, that a calibration is for. `fingerprint` is None where there were no weights."""

    name: str
    dims: ModelDims
    plan: PrunePlan
    fingerprint: str | None


@dataclass(frozen=True)
class _CalibrationFile:
    format_version: int
    model: CalibratedModel
    record: CalibrationRecord
    tensors_sha256: str


@dataclass(frozen=True)
class CalibratedTensor(StoredTensor):
    """A calibrated weight or bias, in memory."""

    tensor: torch.Tensor

    def read(self) -> torch.Tensor:
        """See StoredTensor."""
        return self.tensor


@dataclass(frozen=True)
class Calibration:
    """Calibrated weights and biases by name, in fp32, with what they are for and how they came about."""

    model: CalibratedModel
    record: CalibrationRecord
    tensors: dict[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors as a checkpoint would offer them."""
        return {
            name: CalibratedTensor(name, tuple(t.shape), "F32", Path(TENSORS_NAME), 0, t.nbytes, t)
            for name, t in self.tensors.items()
        }

    def save(self, directory: Path) -> None:
        """Write both files; the JSON file comes last, and stands for a whole calibration."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CALIBRATION_NAME).unlink(missing_ok=True)
        tensors = directory / TENSORS_NAME
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, tensors)
        content = _CalibrationFile(_FORMAT_VERSION, self.model, self.record, file_sha256(tensors))
        write_json(directory / CALIBRATION_NAME, content)

    def require(self, model: CalibratedModel, origin: str) -> None:
        """Raise UsageError unless this calibration is for that model and that tail."""
        mine = self.model
        if mine.dims != model.dims:
            raise UsageError(f"{origin}: made for {mine.name}, a model of other dimensions than {model.name}")
        if mine.plan != model.plan:
            raise UsageError(
                f"{origin}: made for a tail of {mine.plan.num_tail_layers} layers, and the engine's has "
                f"{model.plan.num_tail_layers}; give --tail-layers {mine.plan.num_tail_layers}, or calibrate again"
            )
        if model.fingerprint is not None and mine.fingerprint != model.fingerprint:
            raise UsageError(f"{origin}: made for {mine.name}, whose weights are not those of {model.name}")


def load_calibration(directory: Path) -> Calibration:
    """Read what pop-calibrate wrote. Raises UsageError where it is no calibration, EngineError where it is damaged."""
    path = directory / CALIBRATION_NAME
    if not path.is_file():
        raise UsageError(
            f"--calibration {directory}: holds no {CALIBRATION_NAME}; "
            f"make one with `pop-calibrate -m MODEL --data FILE|self -o {directory}`"
        )
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_CalibrationFile)
    except (msgspec.MsgspecError, UsageError) as error:
        raise EngineError(f"{path}: not a readable calibration ({error}); calibrate again") from error
    if content.format_version != _FORMAT_VERSION:
        raise EngineError(
            f"{path}: format version {content.format_version}, expected {_FORMAT_VERSION}; calibrate again"
        )
    tensors = directory / TENSORS_NAME
    if not tensors.is_file() or file_sha256(tensors) != content.tensors_sha256:
        raise EngineError(f"{tensors}: missing or changed since it was written; calibrate again")
    try:
        return Calibration(content.model, content.record, load_file(tensors))
    except SafetensorError as error:
        raise EngineError(f"{tensors}: damaged ({error}); calibrate again") from error


def describe_model(checkpoint: Checkpoint, dims: ModelDims, plan: PrunePlan) -> CalibratedModel:
    """What a calibration is bound to. Reads a little of every tensor."""
    fingerprint = None if checkpoint.tensors is None else _fingerprint(checkpoint.tensors)
    return CalibratedModel(checkpoint.source.name, dims, plan, fingerprint)


def _fingerprint(tensors: Mapping[str, StoredTensor]) -> str:
    """A hash of names, shapes, dtypes and the first bytes of every tensor: cheap, and another for another model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes)))
    return digest.hexdigest()
