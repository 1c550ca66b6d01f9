"""The mask of a sliding window, for targets whose attention has none of its own."""

from typing import Any

import numpy as np
import onnx_ir as ir

from pop_engine.plugins.attention import Attention


def window_mask(attention: Attention) -> list[ir.Node]:
    """Nodes whose last output is a bool mask [B, 1, rows, max_seq_len]: true where a row attends to a key.

    Row i stands at position total_len − rows + i and sees the last `sliding_window` keys up to its own. Positions
    are int32: max_seq_len is far below, and 64-bit integers are slow on a GPU.
    """
    assert attention.present_key.shape is not None
    max_seq_len = attention.present_key.shape[2]
    assert isinstance(max_seq_len, int)
    nodes: list[ir.Node] = []

    def add(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        return nodes[-1].outputs[0]

    def constant(value: int | list[int]) -> ir.Value:
        return add("Constant", value=ir.tensor(np.array(value, np.int64)))

    rows = add("Squeeze", add("Shape", attention.query, start=2, end=3))
    offsets = add("Range", constant(0), rows, constant(1))
    first = add("Unsqueeze", add("Sub", attention.total_len, rows), constant([1]))
    positions = add("Cast", add("Add", first, offsets), to=int(ir.DataType.INT32))
    last = add("Unsqueeze", positions, constant([1, 3]))
    keys = add("Constant", value=ir.tensor(np.arange(max_seq_len, dtype=np.int32)))
    window = add("Constant", value=ir.tensor(np.array(attention.sliding_window, np.int32)))
    add("And", add("Greater", keys, add("Sub", last, window)), add("LessOrEqual", keys, last))
    return nodes
