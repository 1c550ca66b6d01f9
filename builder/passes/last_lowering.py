"""What a target's last lowering of our own operators must leave behind."""

from abc import ABC

import onnx_ir as ir


class LastLowering(ir.passes.InPlacePass, ABC):
    """Nothing of ours is left after it: no runtime would know it."""

    def ensures(self, model: ir.Model) -> None:
        """Raises PostconditionError where an operator was not lowered."""
        left = {node.op_type for node in model.graph if node.domain == "pop"}
        if left:
            raise ir.passes.PostconditionError(f"operators left without a lowering: {sorted(left)}")
