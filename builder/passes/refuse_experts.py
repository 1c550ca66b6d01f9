"""Say that a target has no operator for a mixture of experts, instead of leaving one that it does not know."""

import onnx_ir as ir

from pop_engine.configs.errors import EngineError
from pop_engine.plugins.experts import Experts


class RefuseExperts(ir.passes.InPlacePass):
    """Raises EngineError where the graph has experts. `target` names what lacks them."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Changes nothing."""
        count = sum(Experts.match(node) is not None for node in model.graph)
        if count:
            raise EngineError(
                f"mixtures of experts ({count} layers) have no lowering for {self._target}; build for ort-cpu"
            )
        return ir.passes.PassResult(model, modified=False)
