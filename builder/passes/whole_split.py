"""Drop splits into one piece."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class DropWholeSplit(ir.passes.InPlacePass):
    """SequenceAt(SplitToSequence(x), 0) that has x's own shape is x.

    Vision towers split their rows by image, and a call has one.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Put x in the place of every such piece."""
        dropped = 0
        for node in list(model.graph):
            split = node.inputs[0].producer() if node.op_type == "SequenceAt" and node.inputs[0] else None
            if split is None or split.op_type != "SplitToSequence":
                continue
            whole, piece = split.inputs[0], node.outputs[0]
            if whole is not None and whole.shape is not None and whole.shape == piece.shape:
                ir.convenience.replace_all_uses_with(piece, whole)
                dropped += 1
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(dropped))
