"""Rows that see beyond themselves, for attention that is always causal: attended once more, where a call has any."""

import numpy as np
import onnx_ir as ir

from pop_engine.plugins.attention import Attention
from pop_engine.plugins.node_list import NodeList
from pop_engine.plugins.visible_keys import mask_of, query_image_ids, query_rows


def has_image_rows(attention: Attention, query: ir.Value) -> list[ir.Node]:
    """Nodes whose last output says whether any row of `query` [B, rows, H · D] is an image's."""
    made = NodeList()
    # A sum and no maximum: a call may have no query rows.
    count = made.add("ReduceSum", [query_image_ids(made, attention, _num_rows(made, query))], {"keepdims": 0})
    made.add("Greater", [count, made.constant(0)])
    return made.nodes


def attend_to_images(attention: Attention, query: ir.Value, attended: ir.Value) -> list[ir.Node]:
    """Nodes whose last output is `attended`, with the rows of images as the operator asks.

    `query` and `attended` are [B, rows, H · D]. Only the rows that are an image's in some sequence are attended again,
    with an explicit mask, over no more keys than they may see: scores of all rows would take the memory of a long
    prompt squared.
    """
    made = NodeList()
    num_rows = _num_rows(made, query)
    is_image = made.add("Greater", [query_image_ids(made, attention, num_rows), made.constant(0)])
    counts = made.add("ReduceMax", [made.int32(is_image), made.constant([0])], {"keepdims": 0})
    picked = made.add("Squeeze", [made.add("NonZero", [counts]), made.constant([0])])
    rows = query_rows(made, attention, num_rows, picked)
    first, stop = _key_range(made, attention, rows.positions)
    one = made.constant([1])
    axis = made.constant([2])
    key, value = (
        made.add("Slice", [present, first, stop, axis, one])
        for present in (attention.present_key, attention.present_value)
    )
    bounds = [made.add("Squeeze", [bound]) for bound in (first, stop)]
    keys = made.int32(made.add("Range", [*bounds, made.constant(1)]))
    mask = mask_of(made, rows, keys, attention.sliding_window)
    own = _split_heads(made, attention, made.add("Gather", [query, picked], {"axis": 1}))
    attributes = {"scale": attention.scale, "softcap": attention.softcap}
    output = made.add("Attention", [own, key, value, mask], attributes)
    joined = _join_heads(made, attention, output)
    places = made.add("Expand", [made.add("Unsqueeze", [picked, made.constant([0, 2])]), made.add("Shape", [joined])])
    made.add("ScatterElements", [attended, places, joined], {"axis": 1})
    return made.nodes


def _num_rows(made: NodeList, query: ir.Value) -> ir.Value:
    return made.add("Shape", [query], {"start": 1, "end": 2})


def _key_range(made: NodeList, attention: Attention, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The keys that any of these rows can see: the first, and the one behind the last, [1] each."""
    stop = made.add("ReduceMax", [attention.total_len], {"keepdims": 1})
    if not attention.sliding_window:
        return made.constant([0]), stop
    lowest = made.add("ReduceMin", [positions], {"keepdims": 0})
    behind = made.add("Sub", [lowest, made.constant(attention.sliding_window - 1, np.int32)])
    wide = made.add("Cast", [made.add("Unsqueeze", [behind, made.constant([0])])], {"to": int(ir.DataType.INT64)})
    return made.add("Max", [wide, made.constant([0])]), stop


def _split_heads(made: NodeList, attention: Attention, rows: ir.Value) -> ir.Value:
    """[B, n, H · D] as [B, H, n, D]."""
    shape = made.constant([0, 0, attention.num_heads, attention.head_dim])
    return made.add("Transpose", [made.add("Reshape", [rows, shape])], {"perm": [0, 2, 1, 3]})


def _join_heads(made: NodeList, attention: Attention, heads: ir.Value) -> ir.Value:
    """[B, H, n, D] as [B, n, H · D]."""
    shape = made.constant([0, 0, attention.num_heads * attention.head_dim])
    return made.add("Reshape", [made.add("Transpose", [heads], {"perm": [0, 2, 1, 3]}), shape])
