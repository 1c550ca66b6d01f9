"""Plans that hold the weights: one for both phases (`--engine-layout single`), or one each (`constants`)."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt import TensorRT
from pop_engine.builder.passes.full_attention import LowerFullAttention
from pop_engine.builder.passes.managed_weights import AttachWeights
from pop_engine.builder.passes.refuse_experts import RefuseExperts
from pop_engine.builder.passes.standard_attention import LowerStandardAttention
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.plan_record import PlanRecord
from pop_engine.plugins.full_attention import lower_to_products


class ConstantWeights(TensorRT):
    """The same two plans with the weights as constants, which TensorRT may lay out as it likes: two copies."""

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """See Target."""
        return [
            RefuseExperts(self.name),
            LowerFullAttention(lower_to_products),
            LowerStandardAttention(),
            AttachWeights(weights, layout),
        ]


class SinglePlan(ConstantWeights):
    """The one-pass prefill graph with one row, its boundary row, is the decode step (DESIGN.md, One session).

    So its plan alone is compiled, and there is one copy of the weights. The decode graph is built as a graph, for
    comparing.
    """

    def decode_with(self, boundary: Boundary) -> Phase:
        """The only plan."""
        return "prefill"

    def compile(self, model: ir.Model, job: PlanJob) -> PlanRecord | None:
        """See Target."""
        return None if job.phase == "decode" else super().compile(model, job)
