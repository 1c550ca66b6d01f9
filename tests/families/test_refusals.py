"""The pieces that decide what can be exported, each against cases that must not slip through."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from pop_engine.builder.checkpoint.converted_tensors import with_converted_tensors
from pop_engine.builder.checkpoint.safetensors_checkpoint import SafetensorsTensor
from pop_engine.builder.checkpoint.safetensors_header import read_header
from pop_engine.builder.export.experts import trace_experts
from pop_engine.builder.export.mask import CausalMask, UnsupportedMask, describe_mask
from pop_engine.builder.export.rotary import hold_rotary
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.plugins.experts import Gate

# transformers types its mask functions by plain numbers and calls them with tensors.
CAUSAL: Any = causal_mask_function


def _window(size: int) -> Any:
    return sliding_window_causal_mask_function(size)


def test_causal_and_window_masks_are_told_apart() -> None:
    assert describe_mask(mask_function=CAUSAL) == CausalMask(0)
    # A window longer than any probe of a plain causal mask is still seen: rows lie around its multiples.
    for window in (1, 8, 4096):
        found = describe_mask(mask_function=_window(window), local_size=window)
        assert found == CausalMask(window)
    assert describe_mask(mask_function=CAUSAL, local_size=8) == CausalMask(0)


@pytest.mark.parametrize(
    ("mask_function", "local_size"),
    [
        (bidirectional_mask_function, None),
        (chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
        (sliding_window_causal_mask_function(7), 8),
        (sliding_window_causal_mask_function(9), 8),
        (lambda batch, head, row, key: key < row, None),
    ],
)
def test_any_other_mask_is_refused(mask_function: Any, local_size: int | None) -> None:
    mask = describe_mask(mask_function=mask_function, local_size=local_size)
    assert isinstance(mask, UnsupportedMask)
    assert "only windows" in mask.reason


def test_a_padding_mask_is_refused() -> None:
    mask = describe_mask(mask_function=CAUSAL, attention_mask=torch.ones(1, 3))
    assert isinstance(mask, UnsupportedMask)


def test_dynamic_rotary_is_held_up_to_its_threshold() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=4, rope_parameters=rope,
                         max_position_embeddings=64)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UsageError, match="--max-seq-len 65: dynamic rotary scaling changes beyond 64"):
        hold_rotary(model, 65)
    positions = torch.arange(64)[None]
    before = model.model.rotary_emb(torch.zeros(1), positions)
    hold_rotary(model, 64)
    assert all(
        torch.equal(*pair) for pair in zip(before, model.model.rotary_emb(torch.zeros(1), positions), strict=True)
    )
    assert model.model.rotary_emb.rope_type == "held"


class _Experts(nn.Module):
    """What transformers' decorator makes of a class, as far as it matters here."""

    has_gate, has_post_expert_norm, is_transposed, has_bias = True, False, False, False

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.limit, self.alpha, self._apply_gate = 7.0, 1.702, gate


@pytest.mark.parametrize("gate", [Gate(), Gate(1.702, 1.0, 7.0, is_interleaved=True), Gate(limit=7.0)])
def test_the_gate_of_experts_is_found(gate: Gate) -> None:
    module = _Experts(lambda product: torch.from_numpy(gate(product.numpy())))
    trace_experts(module)
    assert module.forward._gate == gate  # type: ignore[attr-defined]


def test_experts_with_another_gate_are_refused() -> None:
    with pytest.raises(EngineError, match="gate other than SwiGLU"):
        trace_experts(_Experts(lambda product: nn.functional.gelu(product[:30]) * product[30:]))


def test_experts_that_are_stored_one_by_one_are_joined(tmp_path: Path) -> None:
    # More than ten, so that 2 must come before 10.
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "head_dim": 8, "moe_intermediate_size": 4}
    heads: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=1, num_experts=12)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    spans = {span.name: span for span in read_header(file)}
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in spans
    stored = {n: SafetensorsTensor(n, s.shape, s.dtype, file, s.begin, s.num_bytes) for n, s in spans.items()}
    tensors = with_converted_tensors(stored, config)
    for name, parameter in model.named_parameters():
        assert tensors[name].shape == tuple(parameter.shape)
        np.testing.assert_array_equal(tensors[name].read().numpy(), parameter.detach().numpy())
    del stored["model.layers.0.mlp.experts.11.up_proj.weight"]
    assert "model.layers.0.mlp.experts.gate_up_proj" not in with_converted_tensors(stored, config)
