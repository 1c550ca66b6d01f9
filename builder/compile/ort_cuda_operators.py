"""Refuse what the lowering for CUDA has no form for, by name, before it is half done."""

import onnx_ir as ir

from pop_engine.configs.errors import EngineError

_LOWERED = frozenset({"Attention", "KVCacheUpdate"})


class RefuseOperators(ir.passes.InPlacePass):
    """Raise EngineError for an operator of ours other than attention and the cache's writes."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Look at every node; nothing is changed."""
        for node in model.graph:
            if node.domain == "pop" and node.op_type not in _LOWERED:
                raise EngineError(f"target ort-cuda: does not take {node.op_type} yet; build for ort-cpu")
        return ir.passes.PassResult(model, modified=False)
