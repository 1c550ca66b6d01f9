"""Rotary embedding: the pair (x_i, x_{i + D/2}) of every head turned by the angle of its row's position.

No lowering is needed: ONNX Runtime has the standard's operator, and TensorRT's parser makes a rotary layer of it.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

# Of the ONNX standard, from opset 23 on.
OP_TYPE = "RotaryEmbedding"


def reference(
    heads: NDArray[np.floating], cos: NDArray[np.floating], sin: NDArray[np.floating]
) -> NDArray[np.floating]:
    """What the operator computes on heads [B, H, rows, D] with tables [B, rows, D / 2] (ONNX operator spec)."""
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def make_node(op: Any, heads: ir.Value, cos: ir.Value, sin: ir.Value) -> Any:
    """The operator on heads [B, H, rows, D] and tables [B, rows, D / 2], made by a rewrite rule's builder."""
    assert heads.shape is not None
    return getattr(op, OP_TYPE)(heads, cos, sin, interleaved=0, num_heads=heads.shape[1])
