"""Lower the attention of vision towers."""

from collections.abc import Callable

import onnx_ir as ir

from pop_engine.builder.passes.linear_weights import replace_node
from pop_engine.plugins.full_attention import FullAttention


class LowerFullAttention(ir.passes.InPlacePass):
    """Every FullAttention becomes what `lower` makes of it."""

    def __init__(self, lower: Callable[[FullAttention], list[ir.Node]]) -> None:
        super().__init__()
        self._lower = lower

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower each of them where it stands."""
        found = [attention for node in model.graph if (attention := FullAttention.match(node)) is not None]
        for attention in found:
            replace_node(model.graph, attention.node, self._lower(attention))
        if any(node.domain == "com.microsoft" for node in model.graph):
            model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=bool(found))
