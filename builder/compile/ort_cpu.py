"""ONNX Runtime on the CPU: the default target, which runs anywhere."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.builder.passes.linear_weights import FuseWeightTranspose
from pop_engine.builder.passes.managed_weights import AttachWeights
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import Boundary, Phase
from pop_engine.configs.manifest import TargetName


class OrtCpu:
    """Weights are initializers in external files, which ONNX Runtime maps, packs and lets go one by one."""

    name: TargetName = "ort-cpu"
    boundary_writes = True
    version_packages: tuple[str, ...] = ("onnxruntime",)

    def lowering(self, weights: Mapping[str, ir.Value], layout: WeightLayout) -> list[ir.passes.InPlacePass]:
        """See Target."""
        return [FuseWeightTranspose(), LowerAttention(), StaticReshape(), AttachWeights(weights, layout)]

    def decode_with(self, boundary: Boundary) -> Phase:
        """In the one-pass form the prefill graph with one row is the decode step (DESIGN.md, One session)."""
        return "prefill" if boundary == "one-pass" else "decode"
