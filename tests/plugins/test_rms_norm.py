"""RMS norm: the NumPy reference against torch and ONNX Runtime, and transformers' own norms through the fusion."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pop_engine.builder.passes.fold_constants import FoldConstants
from pop_engine.builder.passes.rms_norm import FuseRmsNorm
from pop_engine.plugins.rms_norm import OP_TYPE, reference

WIDTH = 16
# No rows: a call without context. One row, a chunk, heads (QK-norm), and magnitudes at which fp16 would overflow.
SHAPES = {"no rows": (1, 0, WIDTH), "one row": (1, 1, WIDTH), "chunk": (2, 5, WIDTH), "heads": (2, 3, 4, WIDTH)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def draw(shape: tuple[int, ...], factor: float = 1.0) -> NDArray[np.float32]:
    return (factor * np.random.default_rng(7).standard_normal(shape)).astype(np.float32)


def run(model: ir.Model, inputs: dict[str, Any]) -> Any:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


@shapes
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
def test_reference_is_torch_and_onnx_runtime(shape: tuple[int, ...], epsilon: float) -> None:
    rows, scale = draw(shape), draw((WIDTH,))
    found = reference(rows, scale, epsilon)

    expected = torch.nn.functional.rms_norm(torch.from_numpy(rows), (WIDTH,), torch.from_numpy(scale), epsilon)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)
    values = [
        ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, array in (("rows", rows), ("scale", scale))
    ]
    node = ir.node(OP_TYPE, values, {"axis": -1, "epsilon": epsilon, "stash_type": 1})
    node.outputs[0].name, node.outputs[0].type = "output", values[0].type
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="norm")
    np.testing.assert_allclose(found, run(ir.Model(graph, ir_version=11), {"rows": rows, "scale": scale}), atol=1e-6)


def test_reference_norms_in_fp32_whatever_the_rows_are() -> None:
    """The square of 400 is no fp16 number."""
    rows, scale = draw((1, 3, WIDTH), 400).astype(np.float16), np.ones(WIDTH, np.float16)
    found = reference(rows, scale, 1e-5)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, reference(rows.astype(np.float32), np.ones(WIDTH, np.float32), 1e-5), atol=2e-3)


def fused(norm: torch.nn.Module, rows: torch.Tensor) -> ir.Model:
    """A norm as builds fuse it."""
    program = torch.onnx.export(norm, (rows,), dynamo=True, optimize=False, opset_version=23, verbose=False)
    assert program is not None
    FoldConstants()(program.model)
    FuseRmsNorm()(program.model)
    assert [node.op_type for node in program.model.graph].count(OP_TYPE) == 1
    return program.model


@pytest.mark.parametrize("norm_class", [LlamaRMSNorm, Gemma3RMSNorm])
def test_what_transformers_spells_out_is_fused(norm_class: Any) -> None:
    """Gemma scales by one more than its weight."""
    norm = norm_class(WIDTH, eps=1e-6).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(draw((WIDTH,))))
    rows = torch.from_numpy(draw((1, 3, WIDTH)))
    model = fused(norm, rows)
    scale = norm.weight.detach().numpy() + (norm_class is Gemma3RMSNorm)
    found = run(model, {str(model.graph.inputs[0].name): rows.numpy()})
    np.testing.assert_allclose(found, reference(rows.numpy(), scale, 1e-6), atol=1e-5)


def test_a_norm_that_scales_in_fp32_rounds_once() -> None:
    """Gemma's in fp16: with another rounding before the scale, or of the scale, a quarter of these differ."""
    norm = Gemma3RMSNorm(WIDTH, eps=1e-6).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(draw((WIDTH,), 0.3)))
    norm.half()
    rows = torch.from_numpy(draw((1, 300, WIDTH))).half()
    model = fused(norm, rows)
    found = run(model, {str(model.graph.inputs[0].name): rows.numpy()})
    assert found.dtype == np.float16
    assert np.mean(found == norm(rows).detach().numpy()) > 0.99
