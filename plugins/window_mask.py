"""The mask of windows and images, for targets whose attention has neither."""

import numpy as np
import onnx_ir as ir

from pop_engine.plugins.attention import Attention
from pop_engine.plugins.node_list import NodeList
from pop_engine.plugins.visible_keys import mask_of, query_rows


def window_mask(attention: Attention) -> list[ir.Node]:
    """Nodes whose last output is a bool mask [B, 1, rows, max_seq_len]: true where a row attends to a key.

    Row i stands at position total_len − rows + i and sees the last `sliding_window` keys up to its own, or up to the
    end of its image.
    """
    assert attention.present_key.shape is not None
    max_seq_len = attention.present_key.shape[2]
    assert isinstance(max_seq_len, int)
    made = NodeList()
    num_rows = made.add("Shape", [attention.query], {"start": 2, "end": 3})
    keys = made.constant(np.arange(max_seq_len), np.int32)
    mask_of(made, query_rows(made, attention, num_rows), keys, attention.sliding_window)
    return made.nodes
