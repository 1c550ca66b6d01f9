"""The golden: PAPER.md's method over a Hugging Face decoder, in plain PyTorch.

Independent on purpose: no Hugging Face cache, mask or attention, and nothing of ours. A model is used only for its
weights: norms, projections, rotary table and MLP are called as modules, everything between them is written here from
the paper's formulas. Runs in whatever dtype the model has. Layers are Llama-like: pre-norm, gated or plain MLP,
optional q_norm and k_norm (Qwen3), optional sliding window.

Notation of the paper: L layers, P of them tail, K = L - P trunk, a prompt x_1 … x_N.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# A Hugging Face causal LM. Its attributes are reached by name, so a static type would say nothing.
Model = Any
Layer = Any
Rotary = tuple[Tensor, Tensor]


@dataclass
class ReferenceCache:
    """One `[1, num_key_value_heads, T, head_dim]` tensor per layer for K (after RoPE) and one for V."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """How many tokens every layer holds."""
        return self.keys[0].shape[2]

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """Add the K and V of new tokens to a layer."""
        self.keys[layer_idx] = torch.cat([self.keys[layer_idx], key], dim=2)
        self.values[layer_idx] = torch.cat([self.values[layer_idx], value], dim=2)


def empty_cache(model: Model) -> ReferenceCache:
    """A cache that holds no token yet."""
    cache = ReferenceCache()
    for layer in model.model.layers:
        head_dim = layer.self_attn.head_dim
        num_heads = layer.self_attn.k_proj.out_features // head_dim
        for tensors in (cache.keys, cache.values):
            tensors.append(torch.zeros(1, num_heads, 0, head_dim, dtype=layer.self_attn.k_proj.weight.dtype))
    return cache


@torch.no_grad()
def pruned_prefill(
    model: Model, token_ids: list[int], num_tail_layers: int, cache: ReferenceCache | None = None
) -> ReferenceCache:
    """The cache that the pruned model leaves after x_1 … x_{N-1}, here `token_ids` (may be empty).

    The trunk runs in full. A tail layer does only k_l and v_l, from h_K, which passes it unchanged. With a cache,
    the tokens come after those that it holds: more of a conversation.
    """
    cache = empty_cache(model) if cache is None else cache
    if not token_ids:
        return cache
    hidden, rotary = _embed(model, token_ids, start=cache.num_tokens)
    for layer_idx, layer in enumerate(model.model.layers):
        if layer_idx < _num_trunk_layers(model, num_tail_layers):
            hidden = _full_layer(layer, layer_idx, hidden, rotary, cache)
        else:
            cache.append(layer_idx, *_project_key_value(layer, layer.input_layernorm(hidden), rotary))
    return cache


@torch.no_grad()
def decode(model: Model, cache: ReferenceCache, token_ids: list[int]) -> Tensor:
    """Logits `[n, vocab]` of the full model over new tokens against the cache, which grows by them."""
    hidden, rotary = _embed(model, token_ids, start=cache.num_tokens)
    for layer_idx, layer in enumerate(model.model.layers):
        hidden = _full_layer(layer, layer_idx, hidden, rotary, cache)
    return _logits(model, hidden)


def pop_prefill(model: Model, token_ids: list[int], num_tail_layers: int) -> tuple[Tensor, ReferenceCache]:
    """The paper's two steps: prune x_1 … x_{N-1}, then x_N is the first decode step. Logits `[vocab]` and the cache."""
    cache = pruned_prefill(model, token_ids[:-1], num_tail_layers)
    return decode(model, cache, token_ids[-1:])[-1], cache


@torch.no_grad()
def one_pass_prefill(model: Model, token_ids: list[int], num_tail_layers: int) -> tuple[Tensor, ReferenceCache]:
    """The same result in one pass: the trunk over all N rows, then each tail layer writes rows 1 … N-1 from h_K.

    Row N alone goes through the tail in full, so a tail layer's row N has an input of its own.
    """
    cache = empty_cache(model)
    hidden, rotary = _embed(model, token_ids, start=0)
    num_trunk_layers = _num_trunk_layers(model, num_tail_layers)
    for layer_idx, layer in enumerate(model.model.layers[:num_trunk_layers]):
        hidden = _full_layer(layer, layer_idx, hidden, rotary, cache)
    context, last = hidden[:, :-1], hidden[:, -1:]
    context_rotary, last_rotary = _rows(rotary, slice(None, -1)), _rows(rotary, slice(-1, None))
    for layer_idx, layer in enumerate(model.model.layers[num_trunk_layers:], start=num_trunk_layers):
        cache.append(layer_idx, *_project_key_value(layer, layer.input_layernorm(context), context_rotary))
        last = _full_layer(layer, layer_idx, last, last_rotary, cache)
    return _logits(model, last)[-1], cache


def greedy(model: Model, token_ids: list[int], num_tail_layers: int, max_tokens: int) -> list[int]:
    """The most likely `max_tokens` tokens after the prompt; an end token does not stop it."""
    logits, cache = pop_prefill(model, token_ids, num_tail_layers)
    tokens = [int(logits.argmax())]
    while len(tokens) < max_tokens:
        tokens.append(int(decode(model, cache, tokens[-1:])[-1].argmax()))
    return tokens


def _num_trunk_layers(model: Model, num_tail_layers: int) -> int:
    num_layers = len(model.model.layers)
    if not 0 <= num_tail_layers < num_layers:
        raise ValueError(f"num_tail_layers {num_tail_layers}: expected 0 to {num_layers - 1}")
    return num_layers - num_tail_layers


def _embed(model: Model, token_ids: list[int], start: int) -> tuple[Tensor, Rotary]:
    """Rows of the tokens, and cos and sin at their positions, which begin at `start`."""
    hidden: Tensor = model.model.embed_tokens(torch.tensor([token_ids], dtype=torch.long))
    positions = torch.arange(start, start + len(token_ids)).unsqueeze(0)
    cos, sin = model.model.rotary_emb(hidden, positions)
    return hidden, (cos, sin)


def _rows(rotary: Rotary, rows: slice) -> Rotary:
    return rotary[0][:, rows], rotary[1][:, rows]


def _logits(model: Model, hidden: Tensor) -> Tensor:
    logits: Tensor = model.lm_head(model.model.norm(hidden))
    return logits[0]


def _full_layer(layer: Layer, layer_idx: int, hidden: Tensor, rotary: Rotary, cache: ReferenceCache) -> Tensor:
    """Attention over everything the layer's cache holds, these rows included, then the MLP."""
    normed = layer.input_layernorm(hidden)
    cache.append(layer_idx, *_project_key_value(layer, normed, rotary))
    query = _rope(_heads(layer, normed, "q"), rotary)
    attended = _attend(layer.self_attn, query, cache.keys[layer_idx], cache.values[layer_idx])
    hidden = hidden + layer.self_attn.o_proj(attended)
    output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output


def _project_key_value(layer: Layer, normed: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """k_l = RoPE(k_norm_l(W^K_l x)) and v_l = W^V_l x, for x already through the layer's input norm."""
    return _rope(_heads(layer, normed, "k"), rotary), _heads(layer, normed, "v")


def _heads(layer: Layer, normed: Tensor, kind: str) -> Tensor:
    """Project rows `[1, n, hidden]` to `[1, heads, n, head_dim]` and norm each head where the layer does."""
    attention = layer.self_attn
    projection = getattr(attention, f"{kind}_proj")
    num_heads = projection.out_features // attention.head_dim
    split: Tensor = projection(normed).unflatten(-1, (num_heads, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    normed_heads: Tensor = split if norm is None else norm(split)
    return normed_heads.transpose(1, 2)


def _rope(heads: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pair (x_i, x_{i + d/2}) of each head by its position's angle."""
    cos, sin = (table.unsqueeze(1) for table in rotary)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _attend(attention: Any, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(Q K^T · scale) V, where each of the last n rows sees keys up to its own. Gives `[1, n, heads · d]`."""
    num_groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_groups, dim=1), values.repeat_interleave(num_groups, dim=1)
    scores = query @ keys.transpose(2, 3) * attention.head_dim**-0.5
    visible = _visible_keys(query.shape[2], keys.shape[2], getattr(attention, "sliding_window", None))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    attended: Tensor = weights @ values
    return attended.transpose(1, 2).flatten(2)


def _visible_keys(num_rows: int, num_keys: int, sliding_window: int | None) -> Tensor:
    """Which of the keys each of the last `num_rows` positions sees, `[num_rows, num_keys]`."""
    row = torch.arange(num_keys - num_rows, num_keys).unsqueeze(1)
    key = torch.arange(num_keys).unsqueeze(0)
    causal = key <= row
    return causal if sliding_window is None else causal & (key > row - sliding_window)
