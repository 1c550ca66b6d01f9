"""The golden against Hugging Face itself, where the two must agree, and against itself in its two forms."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pop_reference import ReferenceCache, decode, greedy, one_pass_prefill, pop_prefill, pruned_prefill

NUM_LAYERS = 5
VOCAB_SIZE = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(23)]
FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def exact_norms(model: torch.nn.Module) -> None:
    """Replace Hugging Face's norms, which round to fp32 whatever the model's dtype, by PyTorch's own."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, torch.nn.RMSNorm):
            eps = module.variance_epsilon
            assert isinstance(eps, float)
            norm = torch.nn.RMSNorm(module.weight.shape, eps=eps, dtype=torch.float64)
            norm.weight = module.weight
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, norm)


@pytest.fixture(params=FAMILIES, scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny random model in fp64, with weights large enough that attention is far from uniform."""
    config_class, model_class = FAMILIES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, attn_implementation="sdpa")).double()
    exact_norms(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.4)
            assert weight.dtype == torch.float64, name
    return model


def hugging_face(model: Any, token_ids: list[int]) -> tuple[Tensor, ReferenceCache]:
    """Logits `[n, vocab]` and cache of the unpruned model."""
    with torch.no_grad():
        result = model(torch.tensor([token_ids]), use_cache=True, cache=DynamicCache())
    layers = result.past_key_values.layers
    return result.logits[0], ReferenceCache([layer.keys for layer in layers], [layer.values for layer in layers])


def cache_error(one: ReferenceCache, other: ReferenceCache) -> float:
    """Largest absolute difference of two caches, which must have the same shape."""
    pairs = list(zip(one.keys + one.values, other.keys + other.values, strict=True))
    assert len(pairs) == 2 * NUM_LAYERS
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_full_decode_equals_hugging_face_on_every_row(model: Any) -> None:
    logits, cache = hugging_face(model, PROMPT)
    own = pruned_prefill(model, [], 0)
    assert float((decode(model, own, PROMPT) - logits).abs().max()) < 1e-9
    assert cache_error(own, cache) < 1e-9


def test_decode_in_pieces_equals_hugging_face(model: Any) -> None:
    logits, cache = hugging_face(model, PROMPT)
    own = pruned_prefill(model, PROMPT[:4], 0)
    pieces = torch.cat([decode(model, own, piece) for piece in (PROMPT[4:5], PROMPT[5:16], PROMPT[16:])])
    assert float((pieces - logits[4:]).abs().max()) < 1e-9
    assert cache_error(own, cache) < 1e-9


# A tail of one layer prunes the answer of no row but the last, and the last row runs in full.
@pytest.mark.parametrize("num_tail_layers", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, len(PROMPT)])
def test_a_tail_of_at_most_one_layer_equals_hugging_face(model: Any, num_tokens: int, num_tail_layers: int) -> None:
    logits, cache = hugging_face(model, PROMPT[:num_tokens])
    own_logits, own_cache = pop_prefill(model, PROMPT[:num_tokens], num_tail_layers)
    assert float((own_logits - logits[-1]).abs().max()) < 1e-9
    assert cache_error(own_cache, cache) < 1e-9


@pytest.mark.parametrize("num_tail_layers", [0, 1, 2, NUM_LAYERS - 1])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, len(PROMPT)])
def test_one_pass_equals_two_steps(model: Any, num_tokens: int, num_tail_layers: int) -> None:
    logits, cache = pop_prefill(model, PROMPT[:num_tokens], num_tail_layers)
    one_pass_logits, one_pass_cache = one_pass_prefill(model, PROMPT[:num_tokens], num_tail_layers)
    assert float((one_pass_logits - logits).abs().max()) < 1e-10
    assert cache_error(one_pass_cache, cache) < 1e-10
    assert cache.num_tokens == num_tokens


@pytest.mark.parametrize("num_tail_layers", [2, NUM_LAYERS - 1])
def test_a_longer_tail_changes_the_answer(model: Any, num_tail_layers: int) -> None:
    logits, cache = hugging_face(model, PROMPT)
    own_logits, own_cache = pop_prefill(model, PROMPT, num_tail_layers)
    assert float((own_logits - logits[-1]).abs().max()) > 1e-2
    # The trunk and the first tail layer, which reads h_K as the full model does, hold the same cache.
    num_exact = NUM_LAYERS - num_tail_layers + 1
    for layer_idx in range(NUM_LAYERS):
        error = float((own_cache.keys[layer_idx] - cache.keys[layer_idx])[:, :, :-1].abs().max())
        assert (error < 1e-9) == (layer_idx < num_exact), layer_idx


def test_a_prompt_of_one_token_is_the_full_model_whatever_the_tail(model: Any) -> None:
    logits, _ = hugging_face(model, PROMPT[:1])
    assert float((pop_prefill(model, PROMPT[:1], NUM_LAYERS - 1)[0] - logits[-1]).abs().max()) < 1e-9
    assert pruned_prefill(model, [], NUM_LAYERS - 1).num_tokens == 0


def test_tail_cache_is_the_projection_of_the_trunk_output(model: Any) -> None:
    """v_l = W^V_l · input_layernorm_l(h_K), with h_K read from the full model's hidden states."""
    num_tail_layers = 3
    with torch.no_grad():
        trunk_output = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-1 - num_tail_layers]
        cache = pruned_prefill(model, PROMPT, num_tail_layers)
        for layer_idx in range(NUM_LAYERS - num_tail_layers, NUM_LAYERS):
            layer = model.model.layers[layer_idx]
            value = layer.self_attn.v_proj(layer.input_layernorm(trunk_output))
            assert float((cache.values[layer_idx].transpose(1, 2).flatten(2) - value).abs().max()) < 1e-9


def test_greedy_without_a_tail_equals_generate(model: Any) -> None:
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert greedy(model, PROMPT, 0, 12) == expected[0, len(PROMPT) :].tolist()


def test_greedy_is_pop_prefill_then_full_decode(model: Any) -> None:
    tokens = greedy(model, PROMPT, 3, 6)
    logits, cache = one_pass_prefill(model, PROMPT, 3)
    assert tokens[0] == int(logits.argmax())
    assert tokens[1:] == decode(model, cache, tokens[:-1]).argmax(-1).tolist()


def test_sliding_window_equals_hugging_face() -> None:
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(config).double()
    exact_norms(model)
    assert {layer.self_attn.sliding_window for layer in model.model.layers} == {None, 6}
    logits, _ = hugging_face(model, PROMPT)
    assert float((pop_prefill(model, PROMPT, 1)[0] - logits[-1]).abs().max()) < 1e-9


@pytest.mark.parametrize("num_tail_layers", [-1, NUM_LAYERS])
def test_a_tail_without_a_trunk_is_refused(model: Any, num_tail_layers: int) -> None:
    with pytest.raises(ValueError, match="num_tail_layers"):
        pruned_prefill(model, PROMPT, num_tail_layers)
