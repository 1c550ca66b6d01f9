"""What the calibration tests share: tiny models and random text."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from pop_engine.builder.analysis.corpus import Piece

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def random_model(*, idle_tail: int = 0) -> LlamaForCausalLM:
    """A Llama with weights large enough to matter; its last `idle_tail` layers add nothing to what passes them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.3)
        for layer in model.model.layers[len(model.model.layers) - idle_tail :]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def fused_model(family: str) -> Any:
    """A model whose K and V come out of one projection."""
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=97))
    return Phi3ForCausalLM(Phi3Config(**SIZES))


def random_pieces(count: int, context_len: int = 40, continuation_len: int = 8, seed: int = 0) -> list[Piece]:
    generator = torch.Generator().manual_seed(seed)
    pieces = []
    for _ in range(count):
        tokens = torch.randint(0, SIZES["vocab_size"], (context_len + continuation_len,), generator=generator).tolist()
        pieces.append(Piece((0,), tuple(tokens[:context_len]), tuple(tokens[context_len:])))
    return pieces
