"""Nodes in the order in which they are made: what a lowering of many operators is written with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


class NodeList:
    """`nodes` are all that have been made."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def add(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any] | None = None
    ) -> ir.Value:
        """The output of a new node."""
        self.nodes.append(ir.node(op_type, inputs, attributes))
        return self.nodes[-1].outputs[0]

    def constant(
        self, values: int | Sequence[int] | NDArray[np.integer], dtype: type[np.integer] = np.int64
    ) -> ir.Value:
        """A constant of whole numbers."""
        return self.add("Constant", [], {"value": ir.tensor(np.array(values, dtype))})

    def int32(self, value: ir.Value) -> ir.Value:
        """The value as int32."""
        return self.add("Cast", [value], {"to": int(ir.DataType.INT32)})
