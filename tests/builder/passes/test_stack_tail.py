"""Stacking a tail's projections changes nodes and no numbers, and leaves alone what it cannot express."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from pop_engine.builder.passes.stack_tail import StackTail

BATCH, HIDDEN, NUM_HEADS, HEAD_DIM, MAX_SEQ_LEN, NUM_LAYERS = 2, 24, 3, 8, 12, 4
CACHE = (BATCH, NUM_HEADS, MAX_SEQ_LEN, HEAD_DIM)
# How one layer's projection goes on, from [B, S, H·D] to the update of a cache, [B, H, S, D].
Chain = Callable[["Tail", str, ir.Value], ir.Value]


class Tail:
    """Layers that write what they make of one value; weights are initializers, as ONNX Runtime sees them."""

    def __init__(self, chains: list[Chain], *, norms: str) -> None:
        random = np.random.default_rng(0)
        self._random = random
        self.rows = ir.Value(name="rows", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([BATCH, "S", HIDDEN]))
        self.tables = [
            ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([BATCH, "S", HEAD_DIM // 2]))
            for name in ("cos", "sin")
        ]
        self.past = ir.Value(name="past", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(CACHE))
        self.cache_len = ir.Value(name="cache_len", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([BATCH]))
        inputs = [self.rows, *self.tables, self.past, self.cache_len]
        self.graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 24, "com.microsoft": 1}, name="tail")
        for layer_idx in range(NUM_LAYERS):
            norm_weight = self.weight("norm" if norms == "shared" else f"norm.{layer_idx}", HIDDEN)
            value = self.add("RMSNormalization", self.rows, norm_weight, axis=-1, epsilon=1e-5)
            for number, chain in enumerate(chains):
                name = f"{layer_idx}.{number}"
                weight = self.weight(f"proj.{name}", NUM_HEADS * HEAD_DIM, HIDDEN)
                product = ir.node("FusedMatMul", [value, weight], {"transB": 1}, domain="com.microsoft")
                self.graph.append(product)
                update = chain(self, name, product.outputs[0])
                written = self.add("TensorScatter", self.past, update, self.cache_len, axis=2)
                written.name, written.type, written.shape = f"present.{name}", self.past.type, self.past.shape
                self.graph.outputs.append(written)
        self.model = ir.Model(self.graph, ir_version=11)

    def weight(self, name: str, *shape: int) -> ir.Value:
        if name not in self.graph.initializers:
            tensor = ir.tensor(self._random.standard_normal(shape).astype(np.float32), name=name)
            self.graph.register_initializer(
                ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape))
            )
        return self.graph.initializers[name]

    def add(self, op_type: str, *inputs: ir.Value, **attributes: int | float | list[int]) -> ir.Value:
        node = ir.node(op_type, inputs, attributes or None)
        self.graph.append(node)
        return node.outputs[0]

    def heads(self, value: ir.Value) -> ir.Value:
        target = ir.node("Constant", [], {"value": ir.tensor(np.array([0, 0, NUM_HEADS, HEAD_DIM]))})
        self.graph.append(target)
        return self.add("Reshape", value, target.outputs[0])

    def run(self, num_rows: int) -> list[NDArray[np.float32]]:
        random = np.random.default_rng(1)
        angles = random.standard_normal((BATCH, num_rows, HEAD_DIM // 2)).astype(np.float32)
        inputs = {
            "rows": random.standard_normal((BATCH, num_rows, HIDDEN)).astype(np.float32),
            "cos": np.cos(angles),
            "sin": np.sin(angles),
            "past": random.standard_normal(CACHE).astype(np.float32),
            "cache_len": np.array([3, 5]),
        }
        session = ort.InferenceSession(ir.serde.serialize_model(self.model).SerializeToString())
        names = {value.name for value in session.get_inputs()}
        found: list[NDArray[np.float32]] = session.run(None, {name: inputs[name] for name in inputs if name in names})
        return found

    def count(self, op_type: str) -> int:
        return Counter(node.op_type for node in self.graph)[op_type]


def values(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    return tail.add("Transpose", tail.heads(value), perm=[0, 2, 1, 3])


def biased_values(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    return values(tail, name, tail.add("Add", value, tail.weight(f"bias.{name}", NUM_HEADS * HEAD_DIM)))


def keys(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    return tail.add("RotaryEmbedding", values(tail, name, value), *tail.tables)


def normed_keys(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    """Qwen3: k_norm on the heads, before they go before the rows."""
    normed = tail.add("RMSNormalization", tail.heads(value), tail.weight(f"k_norm.{name}", HEAD_DIM), axis=-1)
    return tail.add("RotaryEmbedding", tail.add("Transpose", normed, perm=[0, 2, 1, 3]), *tail.tables)


def keys_normed_late(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    """Gemma-3: k_norm after the heads went before the rows."""
    weight = tail.weight(f"k_norm.{name}", HEAD_DIM)
    return tail.add("RotaryEmbedding", tail.add("RMSNormalization", values(tail, name, value), weight), *tail.tables)


def negated_values(tail: Tail, name: str, value: ir.Value) -> ir.Value:
    return tail.add("Neg", values(tail, name, value))


@pytest.mark.parametrize("norms", ["own", "shared"])
@pytest.mark.parametrize("key_chain", [keys, normed_keys, keys_normed_late])
@pytest.mark.parametrize("value_chain", [values, biased_values])
def test_numbers_stay(key_chain: Chain, value_chain: Chain, norms: str) -> None:
    chains = [key_chain, value_chain]
    before, after = Tail(chains, norms=norms), Tail(chains, norms=norms)
    assert StackTail()(after.model).modified
    assert before.count("FusedMatMul") == 2 * NUM_LAYERS
    assert after.count("FusedMatMul") == 2
    assert after.count("TensorScatter") == 2 * NUM_LAYERS
    for num_rows in (0, 1, 5):
        for expected, found in zip(before.run(num_rows), after.run(num_rows), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_one_norm_serves_all_layers() -> None:
    tail = Tail([keys, values], norms="own")
    StackTail()(tail.model)
    # One a group; the passes that follow merge equal ones.
    assert tail.count("RMSNormalization") == 2


def test_an_operator_without_a_stacked_form_stays() -> None:
    tail = Tail([negated_values], norms="own")
    assert not StackTail()(tail.model).modified
    assert tail.count("FusedMatMul") == NUM_LAYERS


def test_layers_that_read_other_values_stay() -> None:
    tail = Tail([values], norms="own")
    first = next(node for node in tail.graph if node.op_type == "RMSNormalization")
    doubled = ir.node("Add", [tail.rows, tail.rows])
    tail.graph.insert_before(first, doubled)
    first.replace_input_with(0, doubled.outputs[0])
    StackTail()(tail.model)
    assert tail.count("FusedMatMul") == 2


def test_forms_that_differ_are_stacked_apart() -> None:
    """Gemma-3's tail has local and global layers, with RoPE tables of their own."""
    tail = Tail([keys], norms="own")
    rotations = [node for node in tail.graph if node.op_type == "RotaryEmbedding"]
    for node in rotations[::2]:
        node.replace_input_with(1, tail.tables[1])
    StackTail()(tail.model)
    assert tail.count("FusedMatMul") == tail.count("RotaryEmbedding") == 2
