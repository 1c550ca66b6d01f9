"""Give every Reshape a constant target, and drop those that change nothing."""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


class StaticReshape(ir.passes.InPlacePass):
    """Replace computed Reshape targets by constants: sizes where they are static, 0 where an axis keeps its size.

    Traced targets are computed from shapes and contain a -1, which has no answer in a call that has no rows.
    A Reshape that this cannot express stays as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the targets, then let reshapes of reshapes collapse."""
        for node in list(model.graph):
            if node.op_type == "Reshape" and node.domain == "":
                self._rewrite(model.graph, node)
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)

    def _rewrite(self, graph: ir.Graph, node: ir.Node) -> None:
        data, output = node.inputs[0], node.outputs[0]
        assert data is not None
        source = data.producer()
        if source is not None and source.op_type == "Reshape" and source.inputs[0] is not None:
            data = source.inputs[0]
        if _same_shape(data.shape, output.shape) and not output.is_graph_output():
            ir.convenience.replace_all_uses_with(output, data)
            return
        target = _target(_shape(data), output.shape)
        if target is None:
            return
        constant = ir.node("Constant", [], {"value": ir.tensor(np.array(target, dtype=np.int64))})
        graph.insert_before(node, constant)
        node.replace_input_with(0, data)
        node.replace_input_with(1, constant.outputs[0])
        node.attributes.pop("allowzero", None)


def _same_dim(before: int | ir.SymbolicDim, after: int | ir.SymbolicDim) -> bool:
    unknown = isinstance(before, ir.SymbolicDim) and before.value is None
    return before == after and not unknown


def _same_shape(before: ir.Shape | None, after: ir.Shape | None) -> bool:
    return before is not None and after is not None and len(before) == len(after) and all(map(_same_dim, before, after))


def _shape(value: ir.Value) -> ir.Shape | None:
    """A value's shape, worked out where the exporter leaves it open: it repeats a row with Unsqueeze and Expand."""
    node = value.producer()
    if value.shape is not None or node is None or node.op_type not in ("Unsqueeze", "Expand"):
        return value.shape
    source, given = node.inputs
    before = _shape(source) if source is not None else None
    constant = ir.convenience.get_const_tensor(given) if given is not None else None
    if before is None or constant is None:
        return None
    dims, numbers = list(before), [int(number) for number in constant.numpy().reshape(-1)]
    if node.op_type == "Unsqueeze":
        for axis in sorted(number % (len(dims) + len(numbers)) for number in numbers):
            dims.insert(axis, 1)
    elif len(numbers) == len(dims):
        dims = [dim if number == 1 else number for dim, number in zip(dims, numbers, strict=True)]
    else:
        return None
    return ir.Shape(dims)


def _target(before: ir.Shape | None, after: ir.Shape | None) -> list[int] | None:
    """The constant target, or None where an axis is neither static nor the input's own at that place."""
    if before is None or after is None:
        return None
    target: list[int] = []
    for axis, dim in enumerate(after):
        if isinstance(dim, int):
            target.append(dim)
        elif axis < len(before) and _same_dim(before[axis], dim):
            target.append(0)
        else:
            return None
    return target
