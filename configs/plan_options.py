"""How plans are laid out and compiled, for the targets that have any."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pop_engine.configs.errors import UsageError

# Two plans that take the weights as inputs; the one-pass graph alone as a plan with the weights inside; or, to measure
# what inputs cost, two plans with the weights inside each.
EngineLayout = Literal["split", "single", "constants"]
LAYOUTS: tuple[EngineLayout, ...] = get_args(EngineLayout)

# TensorRT-RTX compiles for one of these on any machine; TensorRT compiles for the GPU it finds.
RTX_GPUS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
DEFAULT_RTX_GPU = "sm89"

# What TensorRT's builder takes: the more, the longer it looks for fast kernels.
OPTIMIZATION_LEVELS = range(6)


@dataclass(frozen=True)
class PlanOptions:
    """What a compiler is asked for beside the graph. `gpu` None is the GPU that is here.

    `optimization_level` None leaves it to TensorRT. `timing_cache` is a file that a build reads and adds to.
    """

    engine_layout: EngineLayout = "split"
    gpu: str | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None

    @property
    def holds_weights(self) -> bool:
        """Whether plans have the weights inside, so that they cannot be compiled without them."""
        return self.engine_layout != "split"

    def __post_init__(self) -> None:
        level = self.optimization_level
        if level is not None and level not in OPTIMIZATION_LEVELS:
            most = OPTIMIZATION_LEVELS[-1]
            raise UsageError(f"--optimization-level {level}: TensorRT takes {OPTIMIZATION_LEVELS[0]} to {most}")
