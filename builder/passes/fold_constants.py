"""Fold constants. The weights are graph inputs by now, so only small things fold."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants_ir


class FoldConstants(ir.passes.InPlacePass):
    """onnxscript's constant folding, without its rewrite rules: they are slow, and nothing here needs them.

    Common subexpressions stay for later: the fusions match only what is not shared.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fold, then drop what nothing reads."""
        fold_constants_ir(model, onnx_shape_inference=False)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)
