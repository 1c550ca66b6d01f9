"""Multiply by a weight as the checkpoint stores it, [out, in], instead of by its transpose."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class FuseWeightTranspose(ir.passes.InPlacePass):
    """MatMul(x, Transpose(W)) becomes com.microsoft.FusedMatMul(transB=1).

    ONNX Runtime packs such a weight straight from the checkpoint's layout. Left alone it would fold the transpose
    first, and hold two copies while it loads.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every product with a transposed graph input."""
        weights = set(model.graph.inputs)
        for node in list(model.graph):
            if node.op_type != "MatMul" or node.domain != "":
                continue
            weight = _transposed(node.inputs[1])
            if weight in weights:
                fused = ir.node("FusedMatMul", [node.inputs[0], weight], {"transB": 1}, domain="com.microsoft")
                replace_node(model.graph, node, [fused])
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)


def _transposed(value: ir.Value | None) -> ir.Value | None:
    """W where the value is the plain transpose of a matrix W."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != [1, 0]:
        return None
    return node.inputs[0]


def replace_node(graph: ir.Graph, node: ir.Node, nodes: list[ir.Node]) -> None:
    """Put `nodes` where `node` stands. The last one's first output takes its name, shape and dtype."""
    old, new = node.outputs[0], nodes[-1].outputs[0]
    new.name, new.shape = old.name, old.shape
    copy_dtype(old, new)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [old], [new])


def copy_dtype(old: ir.Value, new: ir.Value) -> None:
    """Give a new value an old one's dtype, where that is known."""
    if old.dtype is not None:
        new.dtype = old.dtype
