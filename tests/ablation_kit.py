"""What the ablation tests share: tiny models with large weights, and a prompt with its answer."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

from calibration_kit import SIZES, random_model

PROMPT = [(7 * index * index + 3 * index + 5) % 90 + 3 for index in range(20)]
ANSWER = [(5 * index * index + index + 1) % 90 + 3 for index in range(6)]


def window_model() -> Any:
    """A Gemma 3 whose prompt is longer than the window of its local layers."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, "num_hidden_layers": 6}, **options)).eval()
    return _enlarged(model)


def conv1d_model() -> Any:
    """A GPT-2: matrices stored the other way round, and LayerNorm."""
    torch.manual_seed(0)
    return _enlarged(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=97)).eval())


def _enlarged(model: Any) -> Any:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) if weight.dim() == 1 else torch.randn_like(weight) * 0.3)
    return model


def without(model: Any, removed: tuple[int, ...]) -> Any:
    """A copy that has the other layers only, numbered anew."""
    smaller = copy.deepcopy(model)
    layers = [layer for layer_idx, layer in enumerate(smaller.model.layers) if layer_idx not in removed]
    types = getattr(smaller.config, "layer_types", None)
    if types is not None:
        smaller.config.layer_types = [kind for layer_idx, kind in enumerate(types) if layer_idx not in removed]
    smaller.model.layers = nn.ModuleList(layers)
    smaller.config.num_hidden_layers = len(layers)
    for layer_idx, layer in enumerate(layers):
        layer.self_attn.layer_idx = layer_idx
    return smaller


@torch.no_grad()
def answer_rows(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Logits at each token of the answer, from one plain call."""
    rows: torch.Tensor = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return rows


def text(count: int = 6, length: int = 24, seed: int = 3) -> torch.Tensor:
    """Random text [B, S]."""
    return torch.randint(0, 97, (count, length), generator=torch.Generator().manual_seed(seed))


MODELS = {"llama": random_model, "gemma3": window_model}
