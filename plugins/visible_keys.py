"""Which keys each row of an attention sees, in operators: windows, and images whose tokens see each other."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pop_engine.plugins.attention import Attention
from pop_engine.plugins.node_list import NodeList


@dataclass(frozen=True)
class QueryRows:
    """Where query rows stand, [B, rows]: the key of each row itself, and the last key that it sees. Both int32.

    max_seq_len is far below what int32 holds, and 64-bit integers are slow on a GPU.
    """

    positions: ir.Value
    last: ir.Value


def query_rows(made: NodeList, attention: Attention, num_rows: ir.Value, picked: ir.Value | None = None) -> QueryRows:
    """The attention's rows, `num_rows` [1] in all, or those of these indices [n].

    Row i stands at position total_len − rows + i. It sees itself last, or the end of its image.
    """
    rows = made.add("Squeeze", [num_rows])
    if picked is None:
        picked = made.add("Range", [made.constant(0), rows, made.constant(1)])
    first = made.add("Unsqueeze", [made.add("Sub", [attention.total_len, rows]), made.constant([1])])
    positions = made.int32(made.add("Add", [first, picked]))
    if attention.image_ids is None:
        return QueryRows(positions, positions)
    ids = made.add("Gather", [query_image_ids(made, attention, num_rows), picked], {"axis": 1})
    return QueryRows(positions, _image_ends(made, attention, positions, ids))


def _image_ends(made: NodeList, attention: Attention, positions: ir.Value, ids: ir.Value) -> ir.Value:
    """The last key [B, n] that each of these rows sees, where images are seen whole."""
    image_ids = attention.image_ids
    assert image_ids is not None
    call_len = made.add("Squeeze", [made.add("Shape", [image_ids], {"start": 1, "end": 2})])
    first = made.add("Unsqueeze", [made.add("Sub", [attention.total_len, call_len]), made.constant([1])])
    offsets = made.add("Range", [made.constant(0), call_len, made.constant(1)])
    keys = made.add("Unsqueeze", [made.int32(made.add("Add", [first, offsets])), made.constant([1])])
    same = made.add(
        "Equal",
        [made.add("Unsqueeze", [ids, made.constant([2])]), made.add("Unsqueeze", [image_ids, made.constant([1])])],
    )
    own_keys = made.add("Where", [same, keys, made.constant(-1, np.int32)])
    ends = made.add("ReduceMax", [own_keys, made.constant([2])], {"keepdims": 0})
    return made.add("Where", [made.add("Greater", [ids, made.constant(0)]), ends, positions])


def query_image_ids(made: NodeList, attention: Attention, num_rows: ir.Value) -> ir.Value:
    """Image ids [B, rows] of the query rows, the last ones of the call; `num_rows` is [1]."""
    image_ids = attention.image_ids
    assert image_ids is not None
    call_len = made.add("Shape", [image_ids], {"start": 1, "end": 2})
    return made.add("Slice", [image_ids, made.add("Sub", [call_len, num_rows]), call_len, made.constant([1])])


def mask_of(made: NodeList, rows: QueryRows, keys: ir.Value, sliding_window: int) -> ir.Value:
    """Bool mask [B, 1, rows, keys] of keys [K] int32 up to the last that a row sees, within its window."""
    axes = made.constant([1, 3])
    last = made.add("Unsqueeze", [rows.last, axes])
    visible = made.add("LessOrEqual", [keys, last])
    if not sliding_window:
        return visible
    own = last if rows.last is rows.positions else made.add("Unsqueeze", [rows.positions, axes])
    behind = made.add("Sub", [own, made.constant(sliding_window, np.int32)])
    return made.add("And", [made.add("Greater", [keys, behind]), visible])
