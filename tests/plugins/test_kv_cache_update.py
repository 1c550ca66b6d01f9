"""KVCacheUpdate: the NumPy reference against the ONNX operator's, and the lowering in ONNX Runtime."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from pop_engine.plugins.kv_cache_update import (
    DOMAIN,
    OP_TYPE,
    KVCacheUpdate,
    lower_to_tensor_scatter,
    reference,
)

BATCH, HEADS, MAX_LEN, HEAD_DIM = 3, 2, 9, 4
OPSET = 24


def draw(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def tensor_scatter() -> onnx.ModelProto:
    cache = [BATCH, HEADS, MAX_LEN, HEAD_DIM]
    past = helper.make_tensor_value_info("past", TensorProto.FLOAT, cache)
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, [BATCH, HEADS, None, HEAD_DIM])
    cache_len = helper.make_tensor_value_info("cache_len", TensorProto.INT64, [BATCH])
    present = helper.make_tensor_value_info("present", TensorProto.FLOAT, cache)
    node = helper.make_node("TensorScatter", ["past", "rows", "cache_len"], ["present"], axis=-2, mode="linear")
    graph = helper.make_graph([node], "g", [past, rows, cache_len], [present])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_reference_is_onnx_tensor_scatter(num_rows: int) -> None:
    past, rows, cache_len = draw(BATCH, HEADS, MAX_LEN, HEAD_DIM), draw(BATCH, HEADS, num_rows, HEAD_DIM), [0, 6, 4]
    (expected,) = ReferenceEvaluator(tensor_scatter()).run(
        None, {"past": past, "rows": rows, "cache_len": np.array(cache_len)}
    )
    np.testing.assert_array_equal(reference(past, np.array(cache_len), rows), expected)


def test_reference_writes_pieces_one_after_another_and_nothing_else() -> None:
    past, first, second = draw(2, 1, 8, 2), draw(2, 1, 3, 2), draw(2, 1, 1, 2)
    before = past.copy()
    present = reference(past, np.array([1, 4]), first, second)
    for batch_idx, start in enumerate((1, 4)):
        own = present[batch_idx, 0]
        np.testing.assert_array_equal(own[start : start + 3], first[batch_idx, 0])
        np.testing.assert_array_equal(own[start + 3], second[batch_idx, 0, 0])
        np.testing.assert_array_equal(own[:start], before[batch_idx, 0, :start])
        np.testing.assert_array_equal(own[start + 4 :], before[batch_idx, 0, start + 4 :])
    np.testing.assert_array_equal(past, before)


@pytest.mark.parametrize(
    ("cache_len", "rows"),
    [
        ([0, 5, 3], (4,)),
        ([0, 5, 3], (3, 1)),
        ([1, 2, 0], (0, 2)),
        ([0, 0, 0], (1,)),
        ([8, 8, 8], (1,)),
        ([0, 0, 0], (MAX_LEN - 1, 1)),
        ([4, 9, 0], (0, 0)),
    ],
    ids=["one piece", "two pieces", "no context rows", "the first row", "the last row", "the whole cache", "no rows"],
)
def test_lowering_in_onnx_runtime(cache_len: list[int], rows: tuple[int, ...]) -> None:
    past = ir.Value(name="past", shape=ir.Shape(["b", HEADS, MAX_LEN, HEAD_DIM]), type=ir.TensorType(ir.DataType.FLOAT))
    lengths = ir.Value(name="cache_len", shape=ir.Shape(["b"]), type=ir.TensorType(ir.DataType.INT64))
    pieces = tuple(
        ir.Value(
            name=f"piece{i}", shape=ir.Shape(["b", HEADS, f"rows{i}", HEAD_DIM]), type=ir.TensorType(ir.DataType.FLOAT)
        )
        for i in range(len(rows))
    )
    update = KVCacheUpdate.match(ir.node(OP_TYPE, [past, lengths, *pieces], domain=DOMAIN))
    assert update is not None
    assert update.pieces == pieces
    nodes = lower_to_tensor_scatter(update, update.pieces)
    present = nodes[-1].outputs[0]
    present.name, present.type, present.shape = "present", past.type, past.shape
    graph = ir.Graph([past, lengths, *pieces], [present], nodes=nodes, opset_imports={"": OPSET}, name="g")
    model = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    given = {"past": draw(BATCH, HEADS, MAX_LEN, HEAD_DIM), "cache_len": np.array(cache_len)}
    given |= {f"piece{i}": draw(BATCH, HEADS, count, HEAD_DIM) for i, count in enumerate(rows)}
    (found,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, given)
    expected = reference(given["past"], np.array(cache_len), *(given[f"piece{i}"] for i in range(len(rows))))
    np.testing.assert_array_equal(found, expected)


def test_match_takes_nothing_else() -> None:
    value = ir.Value(name="x")
    assert KVCacheUpdate.match(None) is None
    assert KVCacheUpdate.match(ir.node(OP_TYPE, [value, value, value])) is None
    assert KVCacheUpdate.match(ir.node("Attention", [value, value, value], domain=DOMAIN)) is None
