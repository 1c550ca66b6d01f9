"""ONNX Runtime on the CPU: the default target, which runs anywhere."""

import importlib.metadata
from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.passes.experts import LowerExperts
from pop_engine.builder.passes.full_attention import LowerFullAttention
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.builder.passes.linear_weights import FuseWeightTranspose
from pop_engine.builder.passes.managed_weights import AttachWeights
from pop_engine.builder.passes.stack_tail import StackTail
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import NUM_BOUNDARY, Boundary, Phase
from pop_engine.configs.manifest import PartitionCheck, TargetName
from pop_engine.configs.plan_record import PlanRecord
from pop_engine.plugins.full_attention import lower_to_multi_head_attention


class OrtCpu:
    """Weights are initializers in external files, which ONNX Runtime maps, packs and lets go one by one."""

    name: TargetName = "ort-cpu"
    boundary_writes = True
    num_boundary: int | str = NUM_BOUNDARY
    runs_here = True
    partition_check: PartitionCheck | None = None

    def require(self) -> None:
        """ONNX Runtime comes with pop-engine."""

    def versions(self) -> dict[str, str]:
        """See Target."""
        return {"onnxruntime": importlib.metadata.version("onnxruntime")}

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """See Target."""
        return [
            FuseWeightTranspose(),
            LowerExperts(),
            LowerFullAttention(lower_to_multi_head_attention),
            LowerAttention(),
            StaticReshape(),
            CommonSubexpressionEliminationPass(),
            RemoveUnusedNodesPass(),
            StackTail(),
            AttachWeights(weights, layout),
        ]

    def decode_with(self, boundary: Boundary) -> Phase:
        """In the one-pass form the prefill graph with one row is the decode step (DESIGN.md, One session)."""
        return "prefill" if boundary == "one-pass" else "decode"

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """Nothing to compile: ONNX Runtime prepares the graph when it loads it."""
        return None
