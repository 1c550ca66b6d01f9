"""KVCacheUpdate: write new K or V rows into a slot of the cache."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "pop"
OP_TYPE = "KVCacheUpdate"
VERSION = 1


@dataclass(frozen=True)
class KVCacheUpdate:
    """One KVCacheUpdate node of a traced graph.

    `past` is [B, H, M, D], `cache_len` [B] tokens already held, each piece [B, H, rows, D]. The pieces are written
    one after another; a tail layer of a one-pass graph has two: the context rows, then the boundary rows.
    """

    node: ir.Node
    past: ir.Value
    cache_len: ir.Value
    pieces: tuple[ir.Value, ...]

    @classmethod
    def match(cls, node: ir.Node | None) -> "KVCacheUpdate | None":
        """This node as an update, or None where it is something else."""
        if node is None or node.domain != DOMAIN or node.op_type != OP_TYPE:
            return None
        past, cache_len, *pieces = node.inputs
        assert past is not None
        assert cache_len is not None
        return cls(node, past, cache_len, tuple(piece for piece in pieces if piece is not None))

    @property
    def present(self) -> ir.Value:
        """The updated cache."""
        return self.node.outputs[0]


def reference(
    past: NDArray[np.floating], cache_len: NDArray[np.int64], *pieces: NDArray[np.floating]
) -> NDArray[np.floating]:
    """What the operator computes: TensorScatter-24 (ONNX operator spec, linear mode) of the joined pieces."""
    present = past.copy()
    rows = np.concatenate(pieces, axis=2)
    for batch_idx, start in enumerate(cache_len):
        present[batch_idx, :, start : start + rows.shape[2]] = rows[batch_idx]
    return present


def lower_to_tensor_scatter(update: KVCacheUpdate, pieces: tuple[ir.Value, ...]) -> list[ir.Node]:
    """TensorScatter-24 of these pieces, with a Concat before it where there are two. The last node makes the cache.

    A target whose attention writes the last piece itself leaves that one out.
    """
    nodes: list[ir.Node] = []
    rows = pieces[0]
    if len(pieces) > 1:
        nodes.append(ir.node("Concat", pieces, {"axis": 2}))
        rows = nodes[0].outputs[0]
    nodes.append(ir.node("TensorScatter", [update.past, rows, update.cache_len], {"axis": -2, "mode": "linear"}))
    return nodes
