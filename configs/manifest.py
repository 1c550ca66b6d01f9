"""`engine.json`: what an engine directory is, what it may be asked for, and how to tell that it is whole."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from pop_engine.configs.calibration import CalibrationRecord
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import Boundary, CacheShape
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.plan_options import EngineLayout
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.vision import VisionRecord

FORMAT_VERSION = 1
MANIFEST_NAME = "engine.json"
PREFILL_GRAPH = "prefill.onnx"
DECODE_GRAPH = "decode.onnx"
PLAN_SUFFIX = ".plan"
WEIGHTS_DIRECTORY = "weights"
CALIBRATED_WEIGHTS = "pop-calibrated.safetensors"
TOKENIZER_NAME = "tokenizer.json"

TargetName = Literal["ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"]
DType = Literal["fp32", "fp16", "bf16"]
WeightsMode = Literal["link", "copy", "reference"]
# How it was made sure that a graph runs on the GPU as a whole: by a session on one, or by a table of its kernels.
PartitionCheck = Literal["session", "kernel-table"]

_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class ModelSource:
    """Where the checkpoint came from."""

    name: str
    location: str
    revision: str | None = None


@dataclass(frozen=True)
class FileRecord:
    """One file of the engine directory, by its path below it; or a referenced weight file, by its absolute path."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class WeightsRecord:
    """The one copy of the weights. `directory` is below the engine directory, or absolute when referenced.

    Calibrated weights are not the checkpoint's: their file is the engine's own in every mode.
    """

    mode: WeightsMode
    directory: str
    dtype: DType
    num_bytes: int
    files: tuple[FileRecord, ...]


@dataclass(frozen=True)
class TargetRecord:
    """What the graphs were lowered for. `decode_with` names the graph that serves decode on this target.

    `gpu` is the one GPU that the plans run on, like `sm89`, where the target has plans. In `engine_layout` single
    there is one, the prefill graph's, with the weights inside; else each graph has its own, and in `split` they are
    inputs of it.
    """

    name: TargetName
    versions: dict[str, str]
    decode_with: Literal["prefill", "decode"]
    gpu: str | None = None
    engine_layout: EngineLayout | None = None
    partition_check: PartitionCheck | None = None


@dataclass(frozen=True)
class Limits:
    """What the engine may be asked for, in tokens and sequences. `max_prefill_len` bounds one chunk of a prompt."""

    max_seq_len: int
    max_batch_size: int
    max_prefill_len: int


@dataclass(frozen=True)
class TokenizerRecord:
    """How text becomes ids. `special_tokens` holds bos_token, eos_token … as the chat template expects them."""

    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str]
    chat_template: str | None = None


@dataclass(frozen=True)
class VerificationRecord:
    """The check of the engine against the PyTorch reference, in absolute errors of logits and image features.

    Skipped is recorded as skipped, and an engine that was checked without an image has no image tokens here.
    """

    status: Literal["passed", "skipped"]
    reason: str = ""
    num_prompt_tokens: int = 0
    num_decode_steps: int = 0
    prefill_max_error: float = 0.0
    decode_max_error: float = 0.0
    tolerance: float = 0.0
    num_image_tokens: int = 0
    features_max_error: float = 0.0


@dataclass(frozen=True)
class BuildRecord:
    """What the build took: seconds by step, the peak resident size of its processes, the package's version."""

    step_seconds: dict[str, float]
    peak_memory_bytes: int
    pop_engine_version: str


@dataclass(frozen=True)
class Manifest:
    """The contract between builder and runtime: only an engine directory passes between them.

    `boundary_window` is how many of a prompt's last tokens go through the tail in full. `vision` is there where the
    model takes images.
    """

    format_version: int
    source: ModelSource
    dims: ModelDims
    plan: PrunePlan
    boundary: Boundary
    dtype: DType
    target: TargetRecord
    limits: Limits
    cache: CacheShape
    prefill: GraphRecord
    decode: GraphRecord
    weights: WeightsRecord | None
    tokenizer: TokenizerRecord | None
    verification: VerificationRecord
    build: BuildRecord
    files: tuple[FileRecord, ...]
    boundary_window: int = 1
    calibration: CalibrationRecord | None = None
    vision: VisionRecord | None = None

    def save(self, path: Path) -> None:
        """Write the manifest as indented JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, directory: Path, name: str = MANIFEST_NAME) -> "Manifest":
        """Read an engine directory's manifest.

        Raises UsageError where the folder is no engine, EngineError where this version cannot honour it.
        """
        path = directory / name
        if not directory.is_dir():
            raise UsageError(
                f"{directory}: no such engine directory; build one with `pop-build -m MODEL -o {directory}`"
            )
        if not path.is_file():
            raise UsageError(
                f"{directory}: not an engine directory (it has no {name}); "
                f"build one with `pop-build -m MODEL -o {directory}`"
            )
        return parse_manifest(path.read_bytes(), path)

    def with_verification(self, verification: VerificationRecord, build: BuildRecord) -> "Manifest":
        """The same manifest once the check has run."""
        return replace(self, verification=verification, build=build)


@dataclass(frozen=True)
class _Version:
    format_version: int


def parse_manifest(content: bytes, path: Path) -> Manifest:
    """Decode and validate a manifest. `path` is named in the EngineError that a bad one raises."""
    try:
        found = msgspec.json.decode(content, type=_Version).format_version
    except msgspec.MsgspecError as error:
        raise EngineError(f"{path}: not a readable manifest ({error}); build the engine again") from error
    if found != FORMAT_VERSION:
        fix = "upgrade pop-engine" if found > FORMAT_VERSION else "build the engine again"
        raise EngineError(f"{path}: format version {found}, but this version reads {FORMAT_VERSION}; {fix}")
    try:
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UsageError) as error:
        raise EngineError(f"{path}: damaged manifest ({error}); build the engine again") from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def record_file(path: Path, name: str) -> FileRecord:
    """Size and hash of a file, to be kept under `name`."""
    return FileRecord(name, path.stat().st_size, file_sha256(path))
