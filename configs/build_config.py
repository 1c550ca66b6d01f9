"""What a user asks of pop-build, and what that becomes once the model is known."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import yaml

from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import DType, Limits, TargetName, WeightsMode
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.plan_options import DEFAULT_RTX_GPU, RTX_GPUS, EngineLayout, PlanOptions
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import load_prune_plan

DEFAULT_MAX_SEQ_LEN = 4096
DEFAULT_MAX_PREFILL_LEN = 512
SUPPORTED_TARGETS: dict[TargetName, tuple[DType, ...]] = {
    "ort-cpu": ("fp32",),
    "ort-cuda": ("bf16", "fp16"),
    "tensorrt": ("bf16", "fp16"),
    "tensorrt-rtx": ("bf16", "fp16"),
}
# At most one of them says how long the tail is.
_TAIL_OPTIONS = ("tail_layers", "prune_ratio", "prune_plan")
_PLAN_TARGETS: tuple[TargetName, ...] = ("tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class BuildOptions:
    """The options that a flag, a config file or a preset can set. None means: not set here, ask the next one."""

    target: TargetName | None = None
    dtype: DType | None = None
    gpu: str | None = None
    engine_layout: EngineLayout | None = None
    optimization_level: int | None = None
    timing_cache: str | None = None
    tail_layers: int | None = None
    prune_ratio: float | None = None
    prune_plan: str | None = None
    boundary: Boundary | None = None
    boundary_window: int | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None
    max_prefill_len: int | None = None
    weights: WeightsMode | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        tail = [name for name in _TAIL_OPTIONS if getattr(self, name) is not None]
        if len(tail) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in tail[:2])
            raise UsageError(f"{flags}: both say how long the tail is; give one of them")
        for name in ("boundary_window", "max_seq_len", "max_batch_size", "max_prefill_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least 1")

    def over(self, other: "BuildOptions") -> "BuildOptions":
        """These options, with the other's wherever this one is silent. A tail set here hides the other's tail."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if own.keys() & set(_TAIL_OPTIONS):
            other = replace(other, tail_layers=None, prune_ratio=None, prune_plan=None)
        return replace(other, **own)


def load_options(path: Path) -> BuildOptions:
    """Read options from a YAML file, under their flags' names with `_` or `-`.

    Raises UsageError on an unreadable file, an unknown name or a value of the wrong kind.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: cannot be read as YAML ({error})") from error
    return options_from_mapping({} if content is None else content, f"--config {path}")


def options_from_mapping(content: Any, origin: str) -> BuildOptions:
    """Options from plain data; `origin` begins the UsageError that unknown names and wrong values raise."""
    if not isinstance(content, dict):
        raise UsageError(f"{origin}: expected a mapping of option names to values, found {type(content).__name__}")
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    known = [f.name for f in fields(BuildOptions)]
    for name in named:
        if name not in known:
            raise UsageError(f"{origin}: unknown option {name!r}; expected one of {', '.join(known)}")
    try:
        return msgspec.convert(named, BuildOptions)
    except (msgspec.ValidationError, UsageError) as error:
        raise UsageError(f"{origin}: {error}") from error


@dataclass(frozen=True)
class BuildConfig:
    """One call of pop-build. `options` are the flags over the config file; the preset comes in with the model.

    At most one of `calibration`, a folder that pop-calibrate wrote, and `calibrate`, the text to calibrate on.
    """

    model: str
    out: Path
    options: BuildOptions = field(default_factory=BuildOptions)
    force: bool = False
    verify: bool = True
    with_weights: bool = True
    trust_remote_code: bool = False
    dump_dir: Path | None = None
    verbose: bool = False
    calibration: Path | None = None
    calibrate: str | None = None

    def __post_init__(self) -> None:
        if self.calibration is not None and self.calibrate is not None:
            raise UsageError("--calibration and --calibrate: both say how the tail is calibrated; give one of them")
        if self.calibrate is not None and not self.with_weights:
            raise UsageError("--calibrate: needs the model's weights; leave --no-weights out")


@dataclass(frozen=True)
class ResolvedBuild:
    """The build with every choice made and checked against the model."""

    plan: PrunePlan
    boundary: Boundary
    target: TargetName
    dtype: DType
    limits: Limits
    weights: WeightsMode | None
    plans: PlanOptions = field(default_factory=PlanOptions)
    boundary_window: int = 1


def resolve_build(options: BuildOptions, dims: ModelDims) -> ResolvedBuild:
    """Make every open choice. Raises UsageError where an option does not fit the model or the target."""
    target = options.target or "ort-cpu"
    if target not in SUPPORTED_TARGETS:
        raise UsageError(f"--target {target}: not supported yet; expected {', '.join(SUPPORTED_TARGETS)}")
    dtype = options.dtype or SUPPORTED_TARGETS[target][0]
    if dtype not in SUPPORTED_TARGETS[target]:
        expected = ", ".join(SUPPORTED_TARGETS[target])
        raise UsageError(f"--dtype {dtype}: target {target} runs {expected}; leave --dtype out")
    boundary: Boundary = options.boundary or get_args(Boundary)[0]
    return ResolvedBuild(
        plan=_resolve_plan(options, dims.num_hidden_layers),
        boundary=boundary,
        target=target,
        dtype=dtype,
        limits=_resolve_limits(options, dims),
        weights=options.weights,
        plans=_resolve_plans(options, target, dtype, boundary),
        boundary_window=options.boundary_window or 1,
    )


def _resolve_plans(options: BuildOptions, target: TargetName, dtype: DType, boundary: Boundary) -> PlanOptions:
    layout, level, cache = options.engine_layout, options.optimization_level, options.timing_cache
    named = {"--engine-layout": layout, "--optimization-level": level, "--timing-cache": cache}
    given = {flag: value for flag, value in named.items() if value is not None}
    for flag, value in given.items() if target not in _PLAN_TARGETS else ():
        raise UsageError(f"{flag} {value}: only targets {' and '.join(_PLAN_TARGETS)} have plans; leave it out")
    for flag, value in given.items() if target == "tensorrt-rtx" else ():
        if flag != "--engine-layout":
            raise UsageError(
                f"{flag} {value}: target tensorrt-rtx times no kernels when it compiles, it chooses them on the GPU "
                "that loads the plan; leave it out, or compile with --target tensorrt"
            )
    if layout == "single" and boundary == "two-step":
        raise UsageError(
            "--engine-layout single: its one plan decodes with the boundary rows, which --boundary two-step lacks; "
            "leave one of them out"
        )
    gpu = _resolve_gpu(options.gpu, target, dtype)
    return PlanOptions(layout or "split", gpu, level, None if cache is None else Path(cache))


def _resolve_gpu(gpu: str | None, target: TargetName, dtype: DType) -> str | None:
    if target != "tensorrt-rtx":
        if gpu is not None:
            raise UsageError(f"--gpu {gpu}: only target tensorrt-rtx compiles for a GPU that is named; leave it out")
        return None
    gpu = gpu or DEFAULT_RTX_GPU
    if gpu not in RTX_GPUS:
        raise UsageError(f"--gpu {gpu}: TensorRT-RTX compiles for {', '.join(RTX_GPUS)}")
    if gpu == "sm75" and dtype == "bf16":
        raise UsageError("--gpu sm75: has no bf16; add --dtype fp16")
    return gpu


def _resolve_plan(options: BuildOptions, num_hidden_layers: int) -> PrunePlan:
    if options.tail_layers is not None:
        return PrunePlan(num_hidden_layers, options.tail_layers)
    if options.prune_ratio is not None:
        return PrunePlan.from_ratio(num_hidden_layers, options.prune_ratio)
    if options.prune_plan is not None:
        return load_prune_plan(Path(options.prune_plan), num_hidden_layers)
    return PrunePlan.last_third(num_hidden_layers)


def _resolve_limits(options: BuildOptions, dims: ModelDims) -> Limits:
    longest = dims.max_position_embeddings
    max_seq_len = options.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, longest)
    if max_seq_len > longest:
        raise UsageError(
            f"--max-seq-len {max_seq_len}: the model was trained for {longest} positions; give {longest} or less"
        )
    max_prefill_len = min(options.max_prefill_len or DEFAULT_MAX_PREFILL_LEN, max_seq_len)
    return Limits(max_seq_len, options.max_batch_size or 8, max_prefill_len)
