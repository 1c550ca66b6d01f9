"""ONNX Runtime on an NVIDIA GPU. The graphs are built anywhere; the partition is checked as far as that goes here."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.local_gpu import local_gpu
from pop_engine.builder.compile.ort_cuda_operators import RefuseOperators
from pop_engine.builder.compile.ort_cuda_partition import check_partition, possible_check, provider_version
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.builder.passes.linear_weights import FuseWeightTranspose
from pop_engine.builder.passes.managed_weights import KeepWeightInputs
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.manifest import PartitionCheck, TargetName
from pop_engine.configs.plan_record import PlanRecord


class OrtCuda:
    """Weights are inputs of both graphs, so that two sessions share one copy of them on the GPU.

    The boundary is one row: CUDA's attention takes no call without query rows, and no count of them per sequence.
    """

    name: TargetName = "ort-cuda"
    boundary_writes = True
    num_boundary: int | str = 1
    runs_here = False

    def require(self) -> None:
        """The graphs need nothing that is not there: ONNX Runtime's CUDA package is for running them."""

    @property
    def partition_check(self) -> PartitionCheck:
        """See Target."""
        return possible_check(has_gpu=local_gpu() is not None)

    def versions(self) -> dict[str, str]:
        """See Target."""
        return {"onnxruntime-gpu": provider_version(self.partition_check)}

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """See Target."""
        return [
            RefuseOperators(),
            FuseWeightTranspose(),
            LowerAttention(query_seqlens=False),
            StaticReshape(),
            KeepWeightInputs(weights),
        ]

    def decode_with(self, boundary: Boundary) -> Phase:
        """Both graphs are loaded: sharing the weights makes the second one cheap."""
        return "decode"

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """Nothing to compile, but the partition is checked. See Target."""
        check_partition(model, job.out.with_suffix(".onnx"), self.partition_check)
        return None
