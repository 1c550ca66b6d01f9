"""ONNX Runtime on the CPU: the default target, which runs anywhere."""

import importlib.metadata
from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.passes.experts import LowerExperts
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.builder.passes.linear_weights import FuseWeightTranspose
from pop_engine.builder.passes.managed_weights import AttachWeights
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import NUM_BOUNDARY, Boundary, Phase
from pop_engine.configs.manifest import TargetName
from pop_engine.configs.plan_record import PlanRecord


class OrtCpu:
    """Weights are initializers in external files, which ONNX Runtime maps, packs and lets go one by one."""

    name: TargetName = "ort-cpu"
    boundary_writes = True
    num_boundary: int | str = NUM_BOUNDARY
    runs_here = True

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
            LowerAttention(),
            StaticReshape(),
            AttachWeights(weights, layout),
        ]

    def decode_with(self, boundary: Boundary) -> Phase:
        """In the one-pass form the prefill graph with one row is the decode step (DESIGN.md, One session)."""
        return "prefill" if boundary == "one-pass" else "decode"

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """Nothing to compile: ONNX Runtime prepares the graph when it loads it."""
        return None
