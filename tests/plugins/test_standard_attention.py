"""Attention and cache writes in the standard's operators, as TensorRT gets them: against the NumPy references."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from pop_engine.builder.passes.standard_attention import LowerStandardAttention
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import past_key, past_value, present_key, present_value
from pop_engine.plugins import attention, kv_cache_update

NUM_HEADS, NUM_KEY_VALUE_HEADS, HEAD_DIM, MAX_LEN = 4, 2, 8, 12
TOLERANCE = 1e-5
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """What the cache holds per sequence, the new rows, and the attributes."""

    cache_len: tuple[int, ...]
    rows: int
    sliding_window: int = 0
    scale: float = 0.3
    softcap: float = 0.0


def symbolic(case: Case) -> ir.Model:
    """The operators as they are traced, between graph inputs and outputs with the contract's names."""

    def value(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))

    cache: list[int | str] = ["batch", NUM_KEY_VALUE_HEADS, MAX_LEN, HEAD_DIM]
    query = value("query", ["batch", NUM_HEADS, "rows", HEAD_DIM])
    key, given_value = (value(name, ["batch", NUM_KEY_VALUE_HEADS, "rows", HEAD_DIM]) for name in ("key", "value"))
    pasts = [value(past_key(0), cache), value(past_value(0), cache)]
    cache_len, total_len = (value(name, ["batch"], ir.DataType.INT64) for name in ("cache_len", "total_len"))
    updates = [
        ir.node("KVCacheUpdate", [past, cache_len, rows], domain="pop")
        for past, rows in zip(pasts, (key, given_value), strict=True)
    ]
    for update, name in zip(updates, (present_key(0), present_value(0)), strict=True):
        update.outputs[0].name, update.outputs[0].shape = name, ir.Shape(cache)
        update.outputs[0].dtype = ir.DataType.FLOAT
    attributes = {"scale": case.scale, "sliding_window": case.sliding_window, "softcap": case.softcap}
    attend = ir.node("Attention", [query, *(u.outputs[0] for u in updates), total_len], attributes, domain="pop")
    output = attend.outputs[0]
    output.name, output.shape = "output", ir.Shape(["batch", "rows", NUM_HEADS, HEAD_DIM])
    output.dtype = ir.DataType.FLOAT
    graph = ir.Graph(
        [query, key, given_value, *pasts, cache_len, total_len],
        [output, *(update.outputs[0] for update in updates)],
        nodes=[*updates, attend],
        opset_imports={"": 24},
        name="graph",
    )
    return ir.Model(graph, ir_version=11)


def draw(case: Case) -> dict[str, Array]:
    """Caches are full of large numbers behind what is valid: reading there would show."""
    random = np.random.default_rng(5)
    heads = {"query": (NUM_HEADS, case.rows), "key": (NUM_KEY_VALUE_HEADS, case.rows)}
    heads |= {"value": heads["key"], past_key(0): (NUM_KEY_VALUE_HEADS, MAX_LEN)}
    heads |= {past_value(0): heads[past_key(0)]}
    batch = len(case.cache_len)
    given = {name: random.standard_normal((batch, *shape, HEAD_DIM)) for name, shape in heads.items()}
    for sequence, length in enumerate(case.cache_len):
        for name in (past_key(0), past_value(0)):
            given[name][sequence, :, length:] = 100.0
    return {name: array.astype(np.float32) for name, array in given.items()}


CASES = {
    "empty cache": Case((0,), 3),
    "empty cache, one token": Case((0,), 1),
    "full cache, one token": Case((MAX_LEN - 1,), 1),
    "full cache, chunk": Case((MAX_LEN - 4,), 4),
    "sequences of different lengths": Case((0, 5, 8), 4),
    "window, chunk across its edge": Case((2,), 6, sliding_window=4),
    "window, one token": Case((9,), 1, sliding_window=4),
    "window longer than the cache": Case((3, 0), 2, sliding_window=32),
    "window of one": Case((3, 6), 3, sliding_window=1),
    "scale that is a power of two": Case((5,), 2, scale=0.25),
    "scale of one": Case((5,), 2, scale=1.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_lowering_computes_what_the_reference_does(case: Case) -> None:
    given = draw(case)
    total_len = np.array(case.cache_len) + case.rows
    model = symbolic(case)
    LowerStandardAttention()(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    lengths = {"cache_len": np.array(case.cache_len), "total_len": total_len}
    inputs = {name: array for name, array in {**given, **lengths}.items() if name in _inputs(session)}
    output, key, value = session.run(None, inputs)

    expected_key, expected_value = (
        kv_cache_update.reference(given[past], np.array(case.cache_len), given[rows])
        for past, rows in ((past_key(0), "key"), (past_value(0), "value"))
    )
    expected = attention.reference(
        given["query"].astype(np.float64),
        expected_key.astype(np.float64),
        expected_value.astype(np.float64),
        total_len,
        scale=case.scale,
        sliding_window=case.sliding_window,
    )
    np.testing.assert_array_equal(key, expected_key)
    np.testing.assert_array_equal(value, expected_value)
    np.testing.assert_allclose(output, expected, atol=TOLERANCE)


def _inputs(session: ort.InferenceSession) -> set[str]:
    return {declared.name for declared in session.get_inputs()}


def test_softcap_is_refused() -> None:
    with pytest.raises(EngineError, match=r"attention\.0: has softcap 30, which TensorRT's attention lacks"):
        LowerStandardAttention()(symbolic(Case((0,), 1, softcap=30.0)))
