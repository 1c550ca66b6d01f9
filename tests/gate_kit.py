"""Virtual gates written by hand over a Llama, as PAPER.md defines them, and models to try them on."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from calibration_kit import SIZES

VOCAB_SIZE = int(SIZES["vocab_size"])


def scaled_model(scales: list[float]) -> Any:
    """A Llama of as many layers as scales, in fp64; each scale multiplies what its layer adds."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": len(scales)})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.3)
        for layer, scale in zip(model.model.layers, scales, strict=True):
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
    model.requires_grad_(requires_grad=False)
    return model.double()


def hand_gated_logits(model: Any, token_ids: Tensor, gates: list[tuple[Tensor, Tensor]], n: int) -> Tensor:
    """Logits of [B, T] tokens; gates of a layer: of positions 1 … N - 1, and of N … T - 1."""
    hidden = model.model.embed_tokens(token_ids)
    rows = torch.arange(token_ids.shape[1])
    rotary = model.model.rotary_emb(hidden, rows[None])
    causal = torch.where(rows[None, :] > rows[:, None], -torch.inf, 0.0).to(hidden)[None, None]
    for layer, (prefill, decode) in zip(model.model.layers, gates, strict=True):
        gate = torch.where(rows + 1 < n, prefill, decode)[:, None]
        normed = layer.input_layernorm(hidden)
        hidden = hidden + gate * layer.self_attn(normed, position_embeddings=rotary, attention_mask=causal)[0]
        hidden = hidden + gate * layer.mlp(layer.post_attention_layernorm(hidden))
    logits: Tensor = model.lm_head(model.model.norm(hidden))
    return logits


def gates_without(num_layers: int, removed: list[int], phase: int) -> list[tuple[Tensor, Tensor]]:
    """Gates of 1, and of 0 for the removed layers at prefill (phase 0) or at decode (1)."""
    one, zero = torch.ones(()), torch.zeros(())
    pairs = [[one, one] for _ in range(num_layers)]
    for layer_idx in removed:
        pairs[layer_idx][phase] = zero
    return [(prefill, decode) for prefill, decode in pairs]


def loss_increase(model: Any, token_ids: Tensor, removed: list[int], phase: int, n: int) -> float:
    """Nats an output token that removal costs on the model's own outputs: Σ KL(full ‖ removed), by brute force."""
    num_layers = len(model.model.layers)
    full = hand_gated_logits(model, token_ids, gates_without(num_layers, [], 0), n)[:, n - 1 :].log_softmax(-1)
    found = hand_gated_logits(model, token_ids, gates_without(num_layers, removed, phase), n)[:, n - 1 :].log_softmax(
        -1
    )
    divergence = functional.kl_div(found, full, log_target=True, reduction="none").sum(-1)
    return float(divergence.mean())
