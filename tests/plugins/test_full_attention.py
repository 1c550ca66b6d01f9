"""FullAttention: its reference against PyTorch's own, and both lowerings against the reference."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from pop_engine.builder.passes.full_attention import LowerFullAttention
from pop_engine.plugins import full_attention as op
from pop_engine.plugins.full_attention import FullAttention

HEADS, HEAD_DIM = 2, 8
Arrays = list[NDArray[np.float64]]


def rows_of(count: int) -> Arrays:
    """Query, key and value [1, rows, H, D]."""
    random = np.random.default_rng(count)
    return [random.standard_normal((1, count, HEADS, HEAD_DIM)) for _ in range(3)]


def lowered(lower: Callable[[FullAttention], list[ir.Node]]) -> ort.InferenceSession:
    """A graph of one attention, lowered."""
    names = ("query", "key", "value")
    shape = ir.Shape([1, "rows", HEADS, HEAD_DIM])
    inputs = [ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT)) for name in names]
    node = ir.node(op.OP_TYPE, inputs, {"scale": 0.5}, domain=op.DOMAIN)
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].dtype = "output", shape, ir.DataType.FLOAT
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24, op.DOMAIN: 1}, name="attention")
    model = ir.Model(graph, ir_version=11)
    LowerFullAttention(lower)(model)
    del model.opset_imports[op.DOMAIN]
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def test_reference_is_pytorchs() -> None:
    given = rows_of(9)
    query, key, value = (torch.from_numpy(rows).transpose(1, 2) for rows in given)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.5).transpose(1, 2)
    assert np.allclose(op.reference(*given, scale=0.5), expected.numpy())


@pytest.mark.parametrize("lower", [op.lower_to_multi_head_attention, op.lower_to_products])
def test_lowering_computes_the_reference(lower: Callable[[FullAttention], list[ir.Node]]) -> None:
    session = lowered(lower)
    # Few rows and many, on both sides of what a kernel takes at once.
    for count in (1, 4, 700):
        given = rows_of(count)
        inputs = {name: rows.astype(np.float32) for name, rows in zip(("query", "key", "value"), given, strict=True)}
        (found,) = session.run(None, inputs)
        assert found.shape == (1, count, HEADS, HEAD_DIM)
        assert np.abs(found - op.reference(*given, scale=0.5)).max() < 1e-5
