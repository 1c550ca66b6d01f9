"""Our operators in graphs that the plugins' tests make by hand."""

from collections.abc import Mapping

import onnx_ir as ir

from pop_engine.plugins import kv_cache_update


def cache_writes(inputs: Mapping[str, ir.Value]) -> tuple[list[ir.Node], list[ir.Value]]:
    """The writes of layer 0's K and V, with their context piece where there is one, and the caches they leave."""
    nodes, presents = list[ir.Node](), list[ir.Value]()
    for kind in ("key", "value"):
        past = inputs[f"past_{kind}.0"]
        pieces = [inputs[name] for name in (f"context_{kind}", kind) if name in inputs]
        update = ir.node(kv_cache_update.OP_TYPE, [past, inputs["cache_len"], *pieces], domain=kv_cache_update.DOMAIN)
        present = update.outputs[0]
        present.name, present.shape, present.type = f"present_{kind}.0", past.shape, past.type
        nodes.append(update)
        presents.append(present)
    return nodes, presents
