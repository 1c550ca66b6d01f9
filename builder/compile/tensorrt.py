"""TensorRT and TensorRT-RTX: one way of building, two modules that differ in where they can build."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.local_gpu import local_gpu
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt_module import load_module
from pop_engine.builder.compile.tensorrt_plan import compile_plan
from pop_engine.builder.passes.full_attention import LowerFullAttention
from pop_engine.builder.passes.managed_weights import KeepWeightInputs
from pop_engine.builder.passes.refuse_experts import RefuseExperts
from pop_engine.builder.passes.standard_attention import LowerStandardAttention
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.manifest import PartitionCheck, TargetName
from pop_engine.configs.plan_record import PlanRecord
from pop_engine.plugins.full_attention import lower_to_products


class TensorRT:
    """Weights are inputs of both plans, under the checkpoint's names, so both can be bound to one copy of them.

    The boundary is one row: TensorRT must know how many rows the tail's attention gets.
    """

    boundary_writes = False
    num_boundary: int | str = 1
    runs_here = False
    partition_check: PartitionCheck | None = None

    def __init__(self, name: TargetName) -> None:
        self.name: TargetName = name

    def require(self) -> None:
        """See Target."""
        load_module(self.name)
        if self.name == "tensorrt" and local_gpu() is None:
            raise UsageError(
                "--target tensorrt: compiles for the GPU of this machine, and there is none; "
                "--target tensorrt-rtx --gpu sm89 compiles anywhere"
            )

    def versions(self) -> dict[str, str]:
        """See Target."""
        return {self.name: str(load_module(self.name).__version__)}

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """See Target."""
        return [
            RefuseExperts(self.name),
            LowerFullAttention(lower_to_products),
            LowerStandardAttention(),
            KeepWeightInputs(weights),
        ]

    def decode_with(self, boundary: Boundary) -> Phase:
        """Each plan has one use: its kernels are chosen for its shapes."""
        return "decode"

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """See Target."""
        gpu = job.options.gpu or local_gpu()
        assert gpu is not None, "require() comes first"
        return compile_plan(load_module(self.name), model, job, gpu)
