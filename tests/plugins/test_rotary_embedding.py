"""Rotary embedding: the NumPy reference against transformers and ONNX Runtime, and the fusion of what is spelled."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pop_engine.builder.passes.fold_constants import FoldConstants
from pop_engine.builder.passes.rope import FuseRope
from pop_engine.plugins.rotary_embedding import OP_TYPE, reference

HEADS, HEAD_DIM, MAX_LEN = 3, 8, 12
ROTARY = LlamaRotaryEmbedding(
    LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM)
)
# First positions of the sequences, and rows: from an empty cache, into its last place, one token, a chunk, no rows.
CASES = {
    "empty cache, one token": ((0,), 1),
    "empty cache, chunk": ((0,), 5),
    "full cache, one token": ((MAX_LEN - 1,), 1),
    "chunk to the end": ((MAX_LEN - 4,), 4),
    "batch of lengths": ((0, 7, 3), 4),
    "no rows": ((5,), 0),
}
cases = pytest.mark.parametrize(("starts", "rows"), CASES.values(), ids=CASES.keys())


def draw(batch: int, rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal((batch, HEADS, rows, HEAD_DIM)).astype(np.float32)


def tables(starts: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B, rows, D], as transformers has them: both halves the same."""
    positions = torch.tensor(starts)[:, None] + torch.arange(rows)
    cos, sin = ROTARY(torch.zeros(1), positions)
    return cos, sin


@cases
def test_reference_is_transformers_and_onnx_runtime(starts: tuple[int, ...], rows: int) -> None:
    heads, (cos, sin) = draw(len(starts), rows), tables(starts, rows)
    half = HEAD_DIM // 2
    given = {"heads": heads, "cos": cos[..., :half].numpy(), "sin": sin[..., :half].numpy()}
    found = reference(**given)

    query, _ = apply_rotary_pos_emb(torch.from_numpy(heads), torch.from_numpy(heads), cos, sin)
    np.testing.assert_allclose(found, query.numpy(), atol=1e-6)
    values = [
        ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, array in given.items()
    ]
    node = ir.node(OP_TYPE, values, {"interleaved": 0, "num_heads": HEADS})
    node.outputs[0].name, node.outputs[0].type = "output", values[0].type
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="rope")
    np.testing.assert_allclose(found, run(ir.Model(graph, ir_version=11), given), atol=1e-6)


class _Rotate(torch.nn.Module):
    def forward(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = ROTARY(heads, positions)
        turned: torch.Tensor = apply_rotary_pos_emb(heads, heads, cos, sin)[0]
        return turned


def test_what_transformers_spells_out_is_fused() -> None:
    starts, rows = (2, 6), 4
    heads = draw(len(starts), rows)
    positions = torch.tensor(starts)[:, None] + torch.arange(rows)
    given = (torch.from_numpy(heads), positions)
    program = torch.onnx.export(_Rotate(), given, dynamo=True, optimize=False, opset_version=23, verbose=False)
    assert program is not None
    model = program.model
    FoldConstants()(model)
    FuseRope()(model)

    assert [node.op_type for node in model.graph].count(OP_TYPE) == 1
    cos, sin = (table[..., : HEAD_DIM // 2].numpy() for table in tables(starts, rows))
    names = [str(value.name) for value in model.graph.inputs]
    found = run(model, dict(zip(names, (heads, positions.numpy()), strict=True)))
    np.testing.assert_allclose(found, reference(heads, cos, sin), atol=1e-5)


def run(model: ir.Model, inputs: dict[str, Any]) -> Any:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]
