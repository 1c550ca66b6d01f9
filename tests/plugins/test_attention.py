"""Attention: the NumPy reference against torch and the ONNX operator, and the lowering in ONNX Runtime."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from operator_kit import cache_writes
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.plugins import attention, kv_cache_update

HEAD_DIM, MAX_LEN, OPSET = 8, 12, 24
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """Heads, what the cache holds per sequence, new rows in full and before them, and the attributes."""

    num_heads: int = 4
    num_key_value_heads: int = 2
    cache_len: tuple[int, ...] = (5,)
    rows: int = 1
    context_rows: int | None = None
    sliding_window: int = 0
    softcap: float = 0.0
    scale: float = HEAD_DIM**-0.5

    @property
    def batch(self) -> int:
        return len(self.cache_len)

    @property
    def total_len(self) -> NDArray[np.int64]:
        return np.array(self.cache_len) + (self.context_rows or 0) + self.rows

    def draw(self) -> dict[str, NDArray[np.float32]]:
        """Query, pieces of K and V, and caches that are full of other numbers behind what is valid."""
        random = np.random.default_rng(3)
        shapes = {
            "query": (self.num_heads, self.rows),
            "key": (self.num_key_value_heads, self.rows),
            "value": (self.num_key_value_heads, self.rows),
            "past_key.0": (self.num_key_value_heads, MAX_LEN),
            "past_value.0": (self.num_key_value_heads, MAX_LEN),
        }
        if self.context_rows is not None:
            shapes["context_key"] = shapes["context_value"] = (self.num_key_value_heads, self.context_rows)
        # Two deviations: attention is far from uniform, and softcap bites.
        return {
            name: (2 * random.standard_normal((self.batch, *shape, HEAD_DIM))).astype(np.float32)
            for name, shape in shapes.items()
        }

    def expected(self, given: dict[str, NDArray[np.float32]]) -> tuple[NDArray[np.floating], ...]:
        """Output, K cache and V cache by the NumPy references."""
        pieces = ["context_", ""] if self.context_rows is not None else [""]
        key, value = (
            kv_cache_update.reference(
                given[f"past_{kind}.0"], np.array(self.cache_len), *(given[piece + kind] for piece in pieces)
            )
            for kind in ("key", "value")
        )
        output = attention.reference(
            given["query"].astype(np.float64),
            key.astype(np.float64),
            value.astype(np.float64),
            self.total_len,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )
        return output, key, value


CASES = {
    "one head": Case(num_heads=1, num_key_value_heads=1),
    "grouped heads": Case(num_heads=6, num_key_value_heads=2),
    "as many heads": Case(num_heads=3, num_key_value_heads=3),
    "empty cache": Case(cache_len=(0,)),
    "several rows": Case(rows=4),
    "whole prompt": Case(cache_len=(0,), rows=MAX_LEN),
    "filled to the end": Case(cache_len=(MAX_LEN - 3,), rows=3),
    "filled to the end, one token": Case(cache_len=(MAX_LEN - 1,)),
    "batch of lengths": Case(cache_len=(0, 7, 3, 11)),
    "batch, several rows": Case(cache_len=(0, 7, 3), rows=4),
    "window": Case(cache_len=(8,), rows=3, sliding_window=4),
    "window, chunk across its edge": Case(cache_len=(2,), rows=6, sliding_window=4),
    "window, one token in a full cache": Case(cache_len=(MAX_LEN - 1,), sliding_window=4),
    "window of one": Case(cache_len=(8,), rows=2, sliding_window=1),
    "window not reached": Case(cache_len=(2,), rows=3, sliding_window=10),
    "window in a batch": Case(cache_len=(0, 8, 3), rows=4, sliding_window=3),
    "softcap": Case(rows=3, softcap=2.0),
    "another scale": Case(rows=2, scale=0.7),
    "all of it": Case(6, 3, (0, 5, 8), rows=3, sliding_window=4, softcap=5.0, scale=0.5),
}
TAIL_CASES = {
    "context and one row": Case(cache_len=(0,), rows=1, context_rows=6),
    "context and rows": Case(cache_len=(0, 3), rows=3, context_rows=4),
    "no context": Case(cache_len=(5, 2), rows=1, context_rows=0),
    "no boundary rows": Case(cache_len=(4,), rows=0, context_rows=5),
    "no boundary rows, batch": Case(cache_len=(4, 0), rows=0, context_rows=5),
    "window": Case(cache_len=(2,), rows=2, context_rows=5, sliding_window=4),
    "softcap": Case(cache_len=(2, 0), rows=2, context_rows=3, softcap=2.0),
    "filled to the end": Case(cache_len=(0,), rows=1, context_rows=MAX_LEN - 1),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
tail_cases = pytest.mark.parametrize("case", TAIL_CASES.values(), ids=TAIL_CASES.keys())


def close(found: NDArray[np.floating], expected: NDArray[np.floating]) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@cases
def test_reference_is_torch(case: Case) -> None:
    """Softmax over explicit masks; softcap by its formula, where torch's own attention has none."""
    given = case.draw()
    expected, key, value = case.expected(given)
    group = case.num_heads // case.num_key_value_heads
    for b, total in enumerate(case.total_len):
        row = torch.arange(int(total) - case.rows, int(total))[:, None]
        column = torch.arange(MAX_LEN)[None]
        visible = column <= row
        if case.sliding_window:
            visible &= column > row - case.sliding_window
        query, keys, values = (torch.from_numpy(t[b]).double() for t in (given["query"], key, value))
        if case.softcap:
            scores = query @ keys.repeat_interleave(group, 0).mT * case.scale
            scores = (case.softcap * (scores / case.softcap).tanh()).masked_fill(~visible, -torch.inf)
            output = scores.softmax(-1) @ values.repeat_interleave(group, 0)
        else:
            output = torch.nn.functional.scaled_dot_product_attention(
                query[None], keys[None], values[None], visible, scale=case.scale, enable_gqa=True
            )[0]
        close(expected[b], output.transpose(0, 1).numpy())


@cases
def test_reference_is_onnx_attention(case: Case) -> None:
    """Attention-25 with is_causal, nonpad_kv_seqlen and left_window_size, as the spec's own evaluator computes it."""
    given = case.draw()
    expected, key, value = case.expected(given)
    inputs = {"q": given["query"], "k": key, "v": value, "n": case.total_len}
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape)
        for name, tensor in inputs.items()
    ]
    node = helper.make_node(
        "Attention",
        ["q", "k", "v", "", "", "", "n"],
        ["y"],
        is_causal=1,
        scale=case.scale,
        softcap=case.softcap,
        left_window_size=case.sliding_window - 1,
    )
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", infos, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    (found,) = ReferenceEvaluator(model).run(None, inputs)
    assert isinstance(found, np.ndarray)
    close(found.transpose(0, 2, 1, 3), expected)


def value_of(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def pop_graph(case: Case) -> ir.Model:
    """One layer's cache writes and attention in our own operators, as a trace leaves them."""
    heads, kv_heads = case.num_heads, case.num_key_value_heads
    shapes: dict[str, list[int | str]] = {
        "query": ["batch", heads, "num_boundary", HEAD_DIM],
        "key": ["batch", kv_heads, "num_boundary", HEAD_DIM],
        "value": ["batch", kv_heads, "num_boundary", HEAD_DIM],
        "past_key.0": ["batch", kv_heads, MAX_LEN, HEAD_DIM],
        "past_value.0": ["batch", kv_heads, MAX_LEN, HEAD_DIM],
    }
    if case.context_rows is not None:
        shapes["context_key"] = shapes["context_value"] = ["batch", kv_heads, "num_context", HEAD_DIM]
    inputs = {name: value_of(name, shape) for name, shape in shapes.items()}
    for name in ("cache_len", "total_len"):
        inputs[name] = value_of(name, ["batch"], ir.DataType.INT64)
    nodes, presents = cache_writes(inputs)
    attend = ir.node(
        attention.OP_TYPE,
        [inputs["query"], *presents, inputs["total_len"]],
        {"scale": case.scale, "sliding_window": case.sliding_window, "softcap": case.softcap},
        domain=attention.DOMAIN,
    )
    output = attend.outputs[0]
    output.name, output.type = "output", inputs["query"].type
    output.shape = ir.Shape(["batch", "num_boundary", heads, HEAD_DIM])
    imports = {"": OPSET, attention.DOMAIN: 1}
    graph = ir.Graph(
        list(inputs.values()), [output, *presents], nodes=[*nodes, attend], opset_imports=imports, name="layer"
    )
    return ir.Model(graph, ir_version=11)


def run_lowered(case: Case, given: dict[str, NDArray[np.float32]]) -> tuple[NDArray[np.float32], ...]:
    """The lowered graph's output and caches, every cache output bound to its input's memory as the runtime does."""
    model = pop_graph(case)
    LowerAttention()(model)
    LowerAttention().ensures(model)
    model.graph.sort()
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    caches = {kind: given[f"past_{kind}.0"].copy() for kind in ("key", "value")}
    output = np.full((case.batch, case.rows, case.num_heads, HEAD_DIM), np.nan, np.float32)
    integers = {"cache_len": np.array(case.cache_len), "total_len": case.total_len}
    binding = session.io_binding()
    for meta in session.get_inputs():
        kind = meta.name.removeprefix("past_").removesuffix(".0")
        array = caches[kind] if meta.name.startswith("past_") else {**given, **integers}[meta.name]
        binding.bind_input(meta.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for meta in session.get_outputs():
        array = output if meta.name == "output" else caches["key" if "key" in meta.name else "value"]
        binding.bind_output(meta.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return output, caches["key"], caches["value"]


@cases
def test_lowering_in_onnx_runtime(case: Case) -> None:
    given = case.draw()
    for found, expected in zip(run_lowered(case, given), case.expected(given), strict=True):
        close(found, expected)


@tail_cases
def test_lowering_of_a_one_pass_tail(case: Case) -> None:
    """Context rows are written by a scatter, boundary rows by the attention, into one buffer."""
    given = case.draw()
    for found, expected in zip(run_lowered(case, given), case.expected(given), strict=True):
        close(found, expected)


def test_lowering_leaves_the_operators_that_the_contract_declares() -> None:
    model = pop_graph(TAIL_CASES["context and rows"])
    LowerAttention()(model)
    names = [value.name for value in model.graph.outputs]
    assert names == ["output", "present_key.0", "present_value.0", "present_key.0.boundary", "present_value.0.boundary"]
    found = sorted(node.op_type for node in model.graph if node.op_type in ("TensorScatter", "GroupQueryAttention"))
    assert found == ["GroupQueryAttention", "TensorScatter", "TensorScatter"]
    model = pop_graph(CASES["several rows"])
    LowerAttention()(model)
    assert [value.name for value in model.graph.outputs] == ["output", "present_key.0", "present_value.0"]
    assert sum(node.op_type == "TensorScatter" for node in model.graph) == 0


def test_the_cases_are_told_apart() -> None:
    """Window, softcap, scale and lengths each change the answer: none of them could be dropped unseen."""
    base = CASES["all of it"]
    given = base.draw()
    output = base.expected(given)[0]
    for change in ({"sliding_window": 0}, {"sliding_window": 5}, {"softcap": 0.0}, {"scale": 0.4}):
        assert np.abs(dataclasses.replace(base, **change).expected(given)[0] - output).max() > 100 * TOLERANCE
