"""Attention: the new rows' queries against a slot's whole cache: causal, with an optional window, images whole."""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "pop"
OP_TYPE = "Attention"
VERSION = 1

# GroupQueryAttention's inputs for rotary tables and a bias, then those for quantization and norms.
_UNUSED_BEFORE_SINK: list[ir.Value | None] = [None] * 4
_UNUSED_AFTER_SINK: list[ir.Value | None] = [None] * 4


@dataclass(frozen=True)
class Attention:
    """One Attention node of a traced graph.

    `query` is [B, H, rows, D]; `present_key` and `present_value` are [B, H_kv, M, D] with the new rows already
    written; `total_len` [B] is the number of valid keys. Query row i stands at position total_len − rows + i.
    The output is [B, rows, H, D]. `sliding_window` 0 means none, and `softcap` 0.0 none. `head_sink` [H] is one more
    score per head that takes its share of the softmax and adds nothing. `image_ids` [B, S] are of all rows of the
    call, of which the queries are the last: a row whose id is not 0 also sees the later rows of the same id.
    """

    node: ir.Node
    query: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    total_len: ir.Value
    scale: float
    sliding_window: int
    softcap: float
    head_sink: ir.Value | None = None
    image_ids: ir.Value | None = None

    @classmethod
    def match(cls, node: ir.Node | None) -> "Attention | None":
        """This node as an attention, or None where it is something else."""
        if node is None or node.domain != DOMAIN or node.op_type != OP_TYPE:
            return None
        query, key, value, total_len, head_sink, image_ids = [*node.inputs, None, None][:6]
        assert query is not None
        assert key is not None
        assert value is not None
        assert total_len is not None
        return cls(
            node,
            query,
            key,
            value,
            total_len,
            scale=node.attributes["scale"].as_float(),
            sliding_window=node.attributes["sliding_window"].as_int(),
            softcap=node.attributes["softcap"].as_float(),
            head_sink=head_sink,
            image_ids=image_ids,
        )

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return _static_dim(self.query, 1)

    @property
    def num_key_value_heads(self) -> int:
        """Key and value heads."""
        return _static_dim(self.present_key, 1)

    @property
    def head_dim(self) -> int:
        """Size of a query head."""
        return _static_dim(self.query, 3)


def _static_dim(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    dim = value.shape[axis]
    assert isinstance(dim, int), f"axis {axis} of {value.name} is not static"
    return dim


def reference(
    query: NDArray[np.float64],
    present_key: NDArray[np.float64],
    present_value: NDArray[np.float64],
    total_len: NDArray[np.int64],
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    head_sink: NDArray[np.float64] | None = None,
    image_ids: NDArray[np.int64] | None = None,
) -> NDArray[np.float64]:
    """What the operator computes (Attention-25 of the ONNX operator spec, is_causal with nonpad_kv_seqlen).

    A window takes away keys behind a row, and an image none: the mask is (causal or same image) and window (HF
    create_masks_for_vision_model).
    """
    batch, num_heads, rows, _ = query.shape
    group = num_heads // present_key.shape[1]
    output = np.empty((batch, rows, num_heads, present_value.shape[-1]))
    for b, h, i in np.ndindex(batch, num_heads, rows):
        position = int(total_len[b]) - rows + i
        first = max(0, position + 1 - sliding_window) if sliding_window else 0
        stop = position + 1
        if image_ids is not None and (own := image_ids[b, image_ids.shape[1] - rows + i]) > 0:
            stop = int(total_len[b]) - image_ids.shape[1] + int(np.flatnonzero(image_ids[b] == own)[-1]) + 1
        keys = present_key[b, h // group, first:stop]
        scores = keys @ query[b, h, i] * scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        sink = -np.inf if head_sink is None else head_sink[h]
        highest = max(scores.max(), sink)
        weights = np.exp(scores - highest)
        total = weights.sum() + np.exp(sink - highest)
        output[b, i, h] = weights @ present_value[b, h // group, first:stop] / total
    return output


@dataclass(frozen=True)
class GroupQueryAttentionInputs:
    """What com.microsoft.GroupQueryAttention takes besides the attributes.

    New rows are [B, rows, heads · D]. `seqlens_k` is [B] int32, valid keys minus one; `query_seqlens` [B] int32 the
    new rows, or none where a target's kernel has no such input; `max_total_len` a scalar int32.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    past_key: ir.Value
    past_value: ir.Value
    seqlens_k: ir.Value
    max_total_len: ir.Value
    query_seqlens: ir.Value | None


def lower_to_group_query_attention(attention: Attention, inputs: GroupQueryAttentionInputs) -> ir.Node:
    """The node for ONNX Runtime, which writes the new rows and attends. Its cost follows the valid length.

    `query_seqlens` is given although no row is padding: it is what lets a call have no query rows at all (a chunk
    of context), and a batch have several each. Outputs: attention [B, rows, H · D], present_key, present_value.
    """
    given = [
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.past_key,
        inputs.past_value,
        inputs.seqlens_k,
        inputs.max_total_len,
        *_UNUSED_BEFORE_SINK,
        attention.head_sink,
        *_UNUSED_AFTER_SINK,
        inputs.query_seqlens,
    ]
    while given[-1] is None:
        # An input that is none still counts, and a version that does not have it would refuse the node.
        given.pop()
    return ir.node(
        "GroupQueryAttention",
        given,
        {
            "num_heads": attention.num_heads,
            "kv_num_heads": attention.num_key_value_heads,
            "scale": attention.scale,
            "local_window_size": attention.sliding_window or -1,
            "softcap": attention.softcap,
        },
        domain="com.microsoft",
        num_outputs=3,
    )


def lower_to_standard_attention(attention: Attention, mask: ir.Value | None) -> list[ir.Node]:
    """Attention-24 of the ONNX standard; the last node's output is [B, rows, H, D].

    `mask` is bool [B, 1, rows, M], or none for plain causality, which the operator counts back from `total_len`.
    Queries are scaled before it: TensorRT's attention has no scale, and its parser would multiply the whole cache by
    the root of one in every call.
    """
    query, nodes = attention.query, _scale_query(attention)
    if nodes:
        query = nodes[-1].outputs[0]
    inputs = [query, attention.present_key, attention.present_value, mask, None, None, attention.total_len]
    nodes.append(ir.node("Attention", inputs, {"is_causal": int(mask is None), "scale": 1.0}))
    nodes.append(ir.node("Transpose", [nodes[-1].outputs[0]], {"perm": [0, 2, 1, 3]}))
    return nodes


def _scale_query(attention: Attention) -> list[ir.Node]:
    """Nodes that scale the query: in fp32, unless the scale is a power of two, which is exact in every dtype."""
    dtype = attention.query.dtype
    assert dtype is not None
    if attention.scale == 1.0:
        return []
    if math.frexp(attention.scale)[0] == 0.5:
        factor = ir.node("Constant", [], {"value": ir.Tensor(np.array(attention.scale, dtype.numpy()))})
        return [factor, ir.node("Mul", [attention.query, factor.outputs[0]])]
    factor = ir.node("Constant", [], {"value": ir.tensor(np.array(attention.scale, np.float32))})
    wide = ir.node("Cast", [attention.query], {"to": int(ir.DataType.FLOAT)})
    scaled = ir.node("Mul", [wide.outputs[0], factor.outputs[0]])
    return [factor, wide, scaled, ir.node("Cast", [scaled.outputs[0]], {"to": int(dtype)})]
