"""What the build must know about a target: one object a target."""

from collections.abc import Mapping
from typing import Protocol

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.ort_cpu import OrtCpu
from pop_engine.builder.compile.ort_cuda import OrtCuda
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt import TensorRT
from pop_engine.builder.compile.tensorrt_single import ConstantWeights, SinglePlan
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.manifest import PartitionCheck, TargetName
from pop_engine.configs.plan_options import EngineLayout
from pop_engine.configs.plan_record import PlanRecord


class Target(Protocol):
    """How a target wants its graphs. `boundary_writes` and `num_boundary` as in io_contract.prefill_contract.

    `runs_here` says that the machine that builds can run the engine, so that the build can verify it.
    """

    name: TargetName
    boundary_writes: bool
    num_boundary: int | str
    runs_here: bool

    @property
    def partition_check(self) -> PartitionCheck | None:
        """How it is made sure that no node falls back to the CPU, on a target where one could."""

    def require(self) -> None:
        """Raise UsageError where something is missing that the build will need: a package, its libraries, a GPU."""

    def versions(self) -> dict[str, str]:
        """What an engine for this target depends on, with versions."""

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """The passes that turn a fused graph into the target's, given its weights as graph inputs by name."""

    def decode_with(self, boundary: Boundary) -> Phase:
        """The graph that serves decode."""

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """Compile a lowered graph, which is used up; None where the target runs the graph as it is.

        Raises EngineError where the compiler refuses the graph or changes what it means.
        """


_ALL: tuple[Target, ...] = (OrtCpu(), OrtCuda(), TensorRT("tensorrt"), TensorRT("tensorrt-rtx"))
_WEIGHTS_INSIDE: dict[EngineLayout, type[TensorRT]] = {"single": SinglePlan, "constants": ConstantWeights}
_TARGETS: dict[TargetName, Target] = {target.name: target for target in _ALL}


def target_of(name: TargetName, engine_layout: EngineLayout = "split") -> Target:
    """The target of this name. Raises UsageError where there is none yet."""
    if engine_layout != "split":
        return _WEIGHTS_INSIDE[engine_layout](name)
    if name not in _TARGETS:
        raise UsageError(f"--target {name}: not supported yet; expected {', '.join(_TARGETS)}")
    return _TARGETS[name]
