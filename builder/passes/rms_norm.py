"""Fuse the RMS norm that transformers spells out into one operator (plugins/rms_norm.py)."""

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion._rms_normalization import fuse_rms_normalization

from pop_engine.plugins.rms_norm import OP_TYPE


class FuseRmsNorm(ir.passes.InPlacePass):
    """onnxscript's own rule; a norm of another form keeps the nodes it was traced with.

    The rule gives the operator narrow rows and a wide scale where a model norms and scales in fp32 and rounds once, at
    the end (Gemma). The operator rounds before it scales (ONNX operator spec), and with two types TensorRT rounds the
    scale too and ONNX Runtime refuses the graph. So such rows are widened first.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply the fusion to every place it fits."""
        modified = bool(fuse_rms_normalization(model))
        for node in model.graph:
            if node.op_type == OP_TYPE:
                _widen_rows(model.graph, node)
        return ir.passes.PassResult(model, modified=modified)


def _widen_rows(graph: ir.Graph, norm: ir.Node) -> None:
    rows, scale = norm.inputs
    assert rows is not None
    assert scale is not None
    if rows.dtype == scale.dtype:
        return
    assert scale.dtype is not None
    cast = ir.node("Cast", [rows], {"to": scale.dtype})
    cast.outputs[0].dtype, cast.outputs[0].shape = scale.dtype, rows.shape
    graph.insert_before(norm, cast)
    norm.replace_input_with(0, cast.outputs[0])
