"""What a compiled plan is: recorded when it is built, so that nothing needs TensorRT to say it."""

from dataclasses import dataclass
from typing import Literal

from pop_engine.configs.io_contract import GraphContract

CausalKind = Literal["none", "upper-left", "lower-right"]


@dataclass(frozen=True)
class ProfileRecord:
    """One optimisation profile: for every dynamic dimension of the contract its least, tuned and largest size."""

    name: str
    dims: dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class AttentionRecord:
    """One attention: how it is causal, and the tensors that hold its lengths and its mask, where it has them."""

    name: str
    causal: CausalKind
    lengths: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class ConstantRecord:
    """A constant that stays inside the plan: rotary frequencies, an eps, a mask's columns."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(frozen=True)
class WeightsInside:
    """How many parameters a plan holds, and their size."""

    count: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class PlanRecord:
    """One plan, as its network was when it was compiled. `gpu` is the one GPU it runs on, like `sm89`.

    `contract` holds the bindings that were found in the network, aliases and weights included. `weights_inside` are
    the parameters that the plan holds instead. `optimization_level` None is TensorRT's own choice.
    """

    file: str
    gpu: str
    num_bytes: int
    contract: GraphContract
    profiles: tuple[ProfileRecord, ...]
    attentions: tuple[AttentionRecord, ...]
    constants: tuple[ConstantRecord, ...]
    num_layers: int
    weight_streaming: bool
    version_compatible: bool
    compile_seconds: float
    weights_inside: WeightsInside = WeightsInside()
    optimization_level: int | None = None
    timing_cache: bool = False
