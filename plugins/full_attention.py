"""FullAttention: every row sees every row, as in a vision tower. No cache, no mask."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "pop"
OP_TYPE = "FullAttention"
VERSION = 1


@dataclass(frozen=True)
class FullAttention:
    """One FullAttention node of a traced graph. Query, key, value and the output are [B, rows, H, D]."""

    node: ir.Node
    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float

    @classmethod
    def match(cls, node: ir.Node | None) -> "FullAttention | None":
        """This node as an attention, or None where it is something else."""
        if node is None or node.domain != DOMAIN or node.op_type != OP_TYPE:
            return None
        query, key, value = node.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        return cls(node, query, key, value, node.attributes["scale"].as_float())

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads and their size, both static."""
        assert self.query.shape is not None
        num_heads, head_dim = self.query.shape[2:]
        assert isinstance(num_heads, int)
        assert isinstance(head_dim, int)
        return num_heads, head_dim


def reference(
    query: NDArray[np.float64], key: NDArray[np.float64], value: NDArray[np.float64], *, scale: float
) -> NDArray[np.float64]:
    """What the operator computes: softmax(Q K^T · scale) V for each head."""
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output: NDArray[np.float64] = np.einsum("bhqk,bkhd->bqhd", weights, value)
    return output


def lower_to_multi_head_attention(attention: FullAttention) -> list[ir.Node]:
    """com.microsoft.MultiHeadAttention, which works block by block and never holds the whole matrix of scores."""
    num_heads, head_dim = attention.heads
    joined = ir.node("Constant", [], {"value_ints": [0, 0, num_heads * head_dim]})
    split = ir.node("Constant", [], {"value_ints": [0, 0, num_heads, head_dim]})
    flat = [ir.node("Reshape", [rows, joined.outputs[0]]) for rows in (attention.query, attention.key, attention.value)]
    attended = ir.node(
        "MultiHeadAttention",
        [node.outputs[0] for node in flat],
        {"num_heads": num_heads, "scale": attention.scale},
        domain="com.microsoft",
    )
    return [joined, split, *flat, attended, ir.node("Reshape", [attended.outputs[0], split.outputs[0]])]


def lower_to_products(attention: FullAttention) -> list[ir.Node]:
    """Two products with a softmax between them, from which TensorRT makes an attention of its own."""
    scaled = ir.node("Constant", [], {"value_float": attention.scale})
    factor = ir.node("CastLike", [scaled.outputs[0], attention.query])
    query = ir.node("Mul", [attention.query, factor.outputs[0]])
    rows = ir.node("Transpose", [query.outputs[0]], {"perm": [0, 2, 1, 3]})
    keys = ir.node("Transpose", [attention.key], {"perm": [0, 2, 3, 1]})
    values = ir.node("Transpose", [attention.value], {"perm": [0, 2, 1, 3]})
    scores = ir.node("MatMul", [rows.outputs[0], keys.outputs[0]])
    weights = ir.node("Softmax", [scores.outputs[0]], {"axis": -1})
    output = ir.node("MatMul", [weights.outputs[0], values.outputs[0]])
    split = ir.node("Transpose", [output.outputs[0]], {"perm": [0, 2, 1, 3]})
    return [scaled, factor, query, rows, keys, values, scores, weights, output, split]
