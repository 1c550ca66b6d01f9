"""Attention among an image's tokens: the NumPy reference against transformers' masks, and both lowerings."""

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers.masking_utils import and_masks, blockwise_overlay, causal_mask_function, or_masks
from transformers.masking_utils import sliding_window_overlay as window_overlay

from operator_kit import cache_writes
from pop_engine.builder.passes.group_query_attention import LowerAttention
from pop_engine.builder.passes.standard_attention import LowerStandardAttention
from pop_engine.configs.errors import EngineError
from pop_engine.plugins import attention, kv_cache_update

HEADS, KV_HEADS, HEAD_DIM, MAX_LEN, OPSET = 4, 2, 8, 24, 24
SCALE, TOLERANCE = 0.4, 1e-5
Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Case:
    """Image ids of the call's rows for each sequence, what the caches hold, and how many of the rows only write."""

    image_ids: tuple[tuple[int, ...], ...]
    cache_len: tuple[int, ...] = (0,)
    context_rows: int | None = None
    sliding_window: int = 0
    softcap: float = 0.0

    @property
    def num_rows(self) -> int:
        """Rows with queries."""
        return len(self.image_ids[0]) - (self.context_rows or 0)

    @property
    def total_len(self) -> NDArray[np.int64]:
        return np.array(self.cache_len) + len(self.image_ids[0])

    def draw(self) -> Arrays:
        random, batch = np.random.default_rng(5), len(self.cache_len)
        shapes = {"query": (HEADS, self.num_rows), "key": (KV_HEADS, self.num_rows), "value": (KV_HEADS, self.num_rows)}
        shapes |= {"past_key.0": (KV_HEADS, MAX_LEN), "past_value.0": (KV_HEADS, MAX_LEN)}
        if self.context_rows is not None:
            shapes["context_key"] = shapes["context_value"] = (KV_HEADS, self.context_rows)
        return {
            name: (2 * random.standard_normal((batch, *shape, HEAD_DIM))).astype(np.float32)
            for name, shape in shapes.items()
        }

    def caches(self, given: Arrays) -> list[NDArray[np.floating]]:
        """K and V once the call has written its rows."""
        pieces = ["context_", ""] if self.context_rows is not None else [""]
        return [
            kv_cache_update.reference(
                given[f"past_{kind}.0"], np.array(self.cache_len), *(given[piece + kind] for piece in pieces)
            )
            for kind in ("key", "value")
        ]

    def expected(self, given: Arrays, *, images: bool = True) -> NDArray[np.float64]:
        key, value = (cache.astype(np.float64) for cache in self.caches(given))
        return attention.reference(
            given["query"].astype(np.float64),
            key,
            value,
            self.total_len,
            scale=SCALE,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            image_ids=np.array(self.image_ids) if images else None,
        )


ONE = ((0, 0, 1, 1, 1, 1, 0, 0),)
CASES = {
    "image in the middle": Case(ONE),
    "after other tokens": Case(ONE, cache_len=(9,)),
    "image first and last": Case(((2, 2, 2, 2, 2, 2),), cache_len=(7,)),
    "two images, side by side": Case(((0, 3, 3, 3, 4, 4, 4, 0, 0, 5, 5),), cache_len=(4,)),
    "window wider than the image": Case(ONE, cache_len=(9,), sliding_window=6),
    "window narrower than the image": Case(((0, 1, 1, 1, 1, 1, 1, 0, 0),), cache_len=(9,), sliding_window=3),
    "window of one": Case(ONE, cache_len=(3,), sliding_window=1),
    "softcap": Case(ONE, cache_len=(2,), softcap=2.0),
    "batch": Case(((0, 1, 1, 1, 0, 0), (0, 0, 0, 0, 2, 2), (0,) * 6), cache_len=(0, 11, 5)),
    "batch, window": Case(((0, 1, 1, 1, 0, 0), (0, 0, 0, 0, 2, 2), (0,) * 6), cache_len=(0, 11, 5), sliding_window=4),
    "rows of a tail, text": Case(ONE, cache_len=(2,), context_rows=7),
    "rows of a tail, an image's last": Case(((0, 1, 1, 1),), cache_len=(2,), context_rows=3),
    "rows of a tail, within an image": Case(((0, 1, 1, 1, 1, 0, 0),), cache_len=(2,), context_rows=2),
    "rows of a tail, window": Case(((0, 1, 1, 1, 1, 0, 0),), cache_len=(9,), context_rows=2, sliding_window=3),
    "no boundary rows": Case(((0, 1, 1, 1),), cache_len=(2,), context_rows=4),
    "no image": Case(((0,) * 5,), cache_len=(3,)),
    "decode": Case(((0,), (0,)), cache_len=(3, 20)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@cases
def test_reference_is_the_mask_of_transformers(case: Case) -> None:
    """The mask that Gemma3Model asks for: (causal or block) and window, read off transformers' own mask functions."""
    given = case.draw()
    expected = case.expected(given)
    key, value = case.caches(given)
    for b, total in enumerate(map(int, case.total_len)):
        blocks = torch.full((1, total), -1)
        own = torch.tensor(case.image_ids[b])
        blocks[0, total - len(own) :] = torch.where(own > 0, own, -1)
        mask = or_masks(causal_mask_function, blockwise_overlay(blocks))
        if case.sliding_window:
            mask = and_masks(mask, window_overlay(case.sliding_window))
        rows = torch.arange(total - case.num_rows, total)[:, None]
        visible = mask(0, 0, rows, torch.arange(total)[None])
        query, keys, values = (torch.from_numpy(t[b]).double() for t in (given["query"], key, value))
        scores = query @ keys[:, :total].repeat_interleave(2, 0).mT * SCALE
        if case.softcap:
            scores = case.softcap * (scores / case.softcap).tanh()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        output = weights @ values[:, :total].repeat_interleave(2, 0)
        np.testing.assert_allclose(expected[b], output.transpose(0, 1).numpy(), atol=1e-12, rtol=0)


def value_of(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def pop_graph(case: Case) -> ir.Model:
    """One layer in our own operators, as a trace leaves it."""
    rows = "seq" if case.context_rows is None else "num_boundary"
    shapes: dict[str, list[int | str]] = {"query": ["batch", HEADS, rows, HEAD_DIM]}
    shapes |= {name: ["batch", KV_HEADS, rows, HEAD_DIM] for name in ("key", "value")}
    shapes |= {name: ["batch", KV_HEADS, MAX_LEN, HEAD_DIM] for name in ("past_key.0", "past_value.0")}
    if case.context_rows is not None:
        shapes |= {name: ["batch", KV_HEADS, "num_context", HEAD_DIM] for name in ("context_key", "context_value")}
    inputs = {name: value_of(name, shape) for name, shape in shapes.items()}
    inputs |= {name: value_of(name, ["batch"], ir.DataType.INT64) for name in ("cache_len", "total_len")}
    inputs["image_ids"] = value_of("image_ids", ["batch", "seq"], ir.DataType.INT64)
    nodes, presents = cache_writes(inputs)
    attend = ir.node(
        attention.OP_TYPE,
        [inputs["query"], *presents, inputs["total_len"], None, inputs["image_ids"]],
        {"scale": SCALE, "sliding_window": case.sliding_window, "softcap": case.softcap},
        domain=attention.DOMAIN,
    )
    output = attend.outputs[0]
    output.name, output.type, output.shape = "output", inputs["query"].type, ir.Shape(["batch", rows, HEADS, HEAD_DIM])
    imports = {"": OPSET, attention.DOMAIN: 1}
    graph = ir.Graph(
        list(inputs.values()), [output, *presents], nodes=[*nodes, attend], opset_imports=imports, name="layer"
    )
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, case: Case, given: Arrays) -> Arrays:
    """Outputs by name. The caches are bound to their inputs' memory, as the runtime does."""
    model.graph.sort()
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    caches = {kind: given[f"past_{kind}.0"].copy() for kind in ("key", "value")}
    shape = (len(case.cache_len), case.num_rows, HEADS, HEAD_DIM)
    found: Arrays = {"output": np.full(shape, np.nan, np.float32), **caches}
    feeds = {"cache_len": np.array(case.cache_len), "total_len": case.total_len, "image_ids": np.array(case.image_ids)}
    binding = session.io_binding()
    for meta in session.get_inputs():
        kind = meta.name.removeprefix("past_").removesuffix(".0")
        array = caches[kind] if meta.name.startswith("past_") else {**given, **feeds}[meta.name]
        binding.bind_input(meta.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for meta in session.get_outputs():
        array = found["output"] if meta.name == "output" else found["key" if "key" in meta.name else "value"]
        binding.bind_output(meta.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return found


@cases
def test_lowering_to_group_query_attention(case: Case) -> None:
    given, model = case.draw(), pop_graph(case)
    LowerAttention()(model)
    LowerAttention().ensures(model)
    found = run(model, case, given)
    np.testing.assert_allclose(found["output"], case.expected(given), atol=TOLERANCE, rtol=0)
    for kind, expected in zip(("key", "value"), case.caches(given), strict=True):
        np.testing.assert_array_equal(found[kind], expected)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.softcap and case.num_rows])
def test_lowering_to_standard_attention(name: str) -> None:
    """The form for TensorRT: one mask for windows and images."""
    case = CASES[name]
    given, model = case.draw(), pop_graph(case)
    LowerStandardAttention()(model)
    LowerStandardAttention().ensures(model)
    np.testing.assert_allclose(run(model, case, given)["output"], case.expected(given), atol=TOLERANCE, rtol=0)


def test_the_cases_are_told_apart() -> None:
    """Without image ids, and with a window that an image would widen to itself, the answers are others."""
    for name in ("image in the middle", "window narrower than the image", "rows of a tail, within an image"):
        given = CASES[name].draw()
        causal = CASES[name].expected(given, images=False)
        assert np.abs(CASES[name].expected(given) - causal).max() > 1e-2
    narrow = CASES["window narrower than the image"]
    given = narrow.draw()
    assert np.abs(narrow.expected(given) - replace(narrow, sliding_window=8).expected(given)).max() > 1e-2


def test_only_calls_with_images_attend_again() -> None:
    model = pop_graph(CASES["image in the middle"])
    LowerAttention()(model)
    top = [node.op_type for node in model.graph]
    assert top.count("If") == top.count("GroupQueryAttention") == 1
    assert "Attention" not in top
    assert "ScatterElements" not in top


def test_a_target_that_cannot_attend_again_is_refused() -> None:
    with pytest.raises(EngineError, match="attention among an image's tokens: .*; build for ort-cpu"):
        LowerAttention(query_seqlens=False)(pop_graph(CASES["image in the middle"]))
