"""Lower experts to com.microsoft.MoE."""

import numpy as np
import onnx_ir as ir

from pop_engine.builder.passes.linear_weights import replace_node
from pop_engine.plugins.experts import Experts, lower_to_moe


class LowerExperts(ir.passes.InPlacePass):
    """Experts become com.microsoft.MoE. Gate and up halves are interleaved; ONNX Runtime does that once, on loading."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower every node of experts."""
        found = [experts for node in model.graph if (experts := Experts.match(node)) is not None]
        for experts in found:
            nodes: list[ir.Node] = []
            gate_up, bias = experts.gate_up, experts.gate_up_bias
            if not experts.gate.is_interleaved:
                gate_up = _interleave(gate_up, nodes)
                bias = _interleave(bias, nodes) if bias is not None else None
            replace_node(model.graph, experts.node, [*nodes, lower_to_moe(experts, gate_up, bias)])
        if found:
            model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(found))


def _interleave(halves: ir.Value, nodes: list[ir.Node]) -> ir.Value:
    """[E, 2 · I, …] from gate rows then up rows to both by turns; the nodes that do it are appended."""
    assert halves.shape is not None
    num_experts, doubled, *rest = (int(dim) for dim in halves.shape)  # type: ignore[arg-type]

    def reshape(value: ir.Value, *shape: int) -> ir.Value:
        constant = ir.node("Constant", [], {"value": ir.tensor(np.array(shape, dtype=np.int64))})
        node = ir.node("Reshape", [value, constant.outputs[0]])
        nodes.extend((constant, node))
        return node.outputs[0]

    split = reshape(halves, num_experts, 2, doubled // 2, *rest)
    turned = ir.node("Transpose", [split], {"perm": [0, 2, 1, *range(3, 3 + len(rest))]})
    nodes.append(turned)
    return reshape(turned.outputs[0], num_experts, doubled, *rest)
