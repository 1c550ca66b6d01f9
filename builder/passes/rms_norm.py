"""Fuse the RMS norm that transformers spells out into one operator (plugins/rms_norm.py)."""

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization


class FuseRmsNorm(ir.passes.InPlacePass):
    """onnxscript's own rule; a norm of another form keeps the nodes it was traced with."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply the fusion to every place it fits."""
        return ir.passes.PassResult(model, modified=bool(fuse_rms_normalization(model)))
