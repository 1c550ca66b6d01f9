"""The golden: PAPER.md's method over a Hugging Face decoder, in plain PyTorch.

Independent on purpose: no Hugging Face cache, mask or attention, and nothing of ours. A model is used only for its
weights: norms, projections, rotary table and MLP are called as modules, everything between them is written here from
the paper's formulas. Runs in whatever dtype the model has. Layers are Llama-like: pre-norm, gated or plain MLP,
optional q_norm and k_norm (Qwen3), optional sliding window, optional norms of what a layer adds and a rotary base per
kind of layer (Gemma 3). Images come as features; where they go, what DeepStack adds after the first layers (Qwen3-VL),
and which of an image's tokens see each other (Gemma 3), is written here.

Notation of the paper: L layers, P of them tail, K = L - P trunk, a prompt x_1 … x_N.
"""

from collections.abc import Collection
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


@dataclass(frozen=True)
class PromptImages:
    """The images of N tokens: which rows are theirs, `[N]`, and the positions of all rows, `[3, N]`.

    `features` are `[T, hidden]`, for the T rows of images in order; `deepstack` `[n, T, hidden]` is what is added to
    those rows after each of the first n layers (DeepStack, arXiv:2406.04334). `blocks` `[N]`, where given, has one
    number above 0 for all rows that see each other, and 0 for text.
    """

    is_image: Tensor
    positions: Tensor
    features: Tensor
    deepstack: Tensor
    blocks: Tensor | None = None

    def part(self, start: int, end: int | None) -> "PromptImages":
        """The same of some of the tokens."""
        before, own = int(self.is_image[:start].sum()), int(self.is_image[start:end].sum())
        rows = slice(before, before + own)
        return PromptImages(
            self.is_image[start:end],
            self.positions[:, start:end],
            self.features[rows],
            self.deepstack[:, rows],
            None if self.blocks is None else self.blocks[start:end],
        )

    def added(self, layer_idx: int, hidden: Tensor) -> Tensor:
        """A layer's output with what DeepStack adds to it."""
        if layer_idx >= len(self.deepstack):
            return hidden
        hidden = hidden.clone()
        hidden[:, self.is_image] += self.deepstack[layer_idx]
        return hidden


def empty_cache(model: Model) -> ReferenceCache:
    """A cache that holds no token yet."""
    cache = ReferenceCache()
    for layer in _decoder(model).layers:
        head_dim = layer.self_attn.head_dim
        num_heads = layer.self_attn.k_proj.out_features // head_dim
        for tensors in (cache.keys, cache.values):
            tensors.append(torch.zeros(1, num_heads, 0, head_dim, dtype=layer.self_attn.k_proj.weight.dtype))
    return cache


@torch.no_grad()
def pruned_prefill(
    model: Model,
    token_ids: list[int],
    num_tail_layers: int,
    cache: ReferenceCache | None = None,
    images: PromptImages | None = None,
) -> ReferenceCache:
    """The cache that the pruned model leaves after x_1 … x_{N-1}, here `token_ids` (may be empty).

    The trunk runs in full. A tail layer does only k_l and v_l, from h_K, which passes it unchanged. With a cache,
    the tokens come after those that it holds: more of a conversation.
    """
    tail = range(_num_trunk_layers(model, num_tail_layers), len(_decoder(model).layers))
    return prefill_without(model, token_ids, tail, cache, images)


@torch.no_grad()
def prefill_without(
    model: Model,
    token_ids: list[int],
    pruned: Collection[int],
    cache: ReferenceCache | None = None,
    images: PromptImages | None = None,
) -> ReferenceCache:
    """The same with the layers of any indices pruned: each writes its K and V of what reaches it."""
    cache = empty_cache(model) if cache is None else cache
    if not token_ids:
        return cache
    hidden, rotary = _embed(model, token_ids, cache.num_tokens, images)
    for layer_idx, layer in enumerate(_decoder(model).layers):
        if layer_idx not in pruned:
            hidden = _full_layer(layer, layer_idx, hidden, rotary[layer_idx], cache, images)
        else:
            cache.append(layer_idx, *_project_key_value(layer, layer.input_layernorm(hidden), rotary[layer_idx]))
    return cache


@torch.no_grad()
def decode(
    model: Model,
    cache: ReferenceCache,
    token_ids: list[int],
    images: PromptImages | None = None,
    position: int | None = None,
) -> Tensor:
    """Logits `[n, vocab]` of the full model over new tokens against the cache, which grows by them.

    After images the first token's `position` is less than the number of tokens before it.
    """
    start = cache.num_tokens if position is None else position
    hidden, rotary = _embed(model, token_ids, start, images)
    for layer_idx, layer in enumerate(_decoder(model).layers):
        hidden = _full_layer(layer, layer_idx, hidden, rotary[layer_idx], cache, images)
    return _logits(model, hidden)


def pop_prefill(
    model: Model, token_ids: list[int], num_tail_layers: int, images: PromptImages | None = None
) -> tuple[Tensor, ReferenceCache]:
    """The paper's two steps: prune x_1 … x_{N-1}, then x_N is the first decode step. Logits `[vocab]` and the cache."""
    context, last = (None, None) if images is None else (images.part(0, -1), images.part(len(token_ids) - 1, None))
    cache = pruned_prefill(model, token_ids[:-1], num_tail_layers, images=context)
    return decode(model, cache, token_ids[-1:], last)[-1], cache


@torch.no_grad()
def one_pass_prefill(
    model: Model, token_ids: list[int], num_tail_layers: int, images: PromptImages | None = None
) -> tuple[Tensor, ReferenceCache]:
    """The same result in one pass: the trunk over all N rows, then each tail layer writes rows 1 … N-1 from h_K.

    Row N alone goes through the tail in full, so a tail layer's row N has an input of its own. Where it is the last
    of an image whose rows see each other, only this form lets them see it in the trunk.
    """
    cache = empty_cache(model)
    hidden, rotary = _embed(model, token_ids, 0, images)
    num_trunk_layers = _num_trunk_layers(model, num_tail_layers)
    layers = _decoder(model).layers
    for layer_idx, layer in enumerate(layers[:num_trunk_layers]):
        hidden = _full_layer(layer, layer_idx, hidden, rotary[layer_idx], cache, images)
    context, last = hidden[:, :-1], hidden[:, -1:]
    for layer_idx, layer in enumerate(layers[num_trunk_layers:], start=num_trunk_layers):
        context_rotary, last_rotary = (_rows(rotary[layer_idx], rows) for rows in (slice(None, -1), slice(-1, None)))
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


def _decoder(model: Model) -> Model:
    """The language model, which a model with images holds beside its vision tower."""
    return getattr(model.model, "language_model", model.model)


def _num_trunk_layers(model: Model, num_tail_layers: int) -> int:
    num_layers = len(_decoder(model).layers)
    if not 0 <= num_tail_layers < num_layers:
        raise ValueError(f"num_tail_layers {num_tail_layers}: expected 0 to {num_layers - 1}")
    return num_layers - num_tail_layers


def _embed(model: Model, token_ids: list[int], start: int, images: PromptImages | None) -> tuple[Tensor, list[Rotary]]:
    """Rows of the tokens or images, and each layer's cos and sin at their positions.

    These begin at `start` without images.
    """
    decoder = _decoder(model)
    hidden: Tensor = decoder.embed_tokens(torch.tensor([token_ids], dtype=torch.long))
    positions = torch.arange(start, start + len(token_ids)).unsqueeze(0)
    if hasattr(decoder.rotary_emb, "mrope_section"):
        # Time, row and column: all the same for text.
        positions = positions.expand(3, 1, -1) if images is None else images.positions.unsqueeze(1)
    if images is not None:
        hidden[:, images.is_image] = images.features
    return hidden, [_rotary(decoder, layer, hidden, positions) for layer in decoder.layers]


def _rotary(decoder: Model, layer: Layer, hidden: Tensor, positions: Tensor) -> Rotary:
    """Cos and sin of one layer; where layers of different kinds have different ones, of its kind."""
    if isinstance(decoder.rotary_emb.rope_type, dict):
        cos, sin = decoder.rotary_emb(hidden, positions, layer.self_attn.layer_type)
    else:
        cos, sin = decoder.rotary_emb(hidden, positions)
    return cos, sin


def _rows(rotary: Rotary, rows: slice) -> Rotary:
    return rotary[0][:, rows], rotary[1][:, rows]


def _logits(model: Model, hidden: Tensor) -> Tensor:
    logits: Tensor = model.lm_head(_decoder(model).norm(hidden))
    return logits[0]


def _full_layer(
    layer: Layer,
    layer_idx: int,
    hidden: Tensor,
    rotary: Rotary,
    cache: ReferenceCache,
    images: PromptImages | None = None,
) -> Tensor:
    """Attention over everything the layer's cache holds, these rows included, then the MLP."""
    normed = layer.input_layernorm(hidden)
    cache.append(layer_idx, *_project_key_value(layer, normed, rotary))
    query = _rope(_heads(layer, normed, "q"), rotary)
    blocks = None if images is None else images.blocks
    attended = layer.self_attn.o_proj(
        _attend(layer.self_attn, query, cache.keys[layer_idx], cache.values[layer_idx], blocks)
    )
    if hasattr(layer, "pre_feedforward_layernorm"):
        hidden = hidden + layer.post_attention_layernorm(attended)
        added = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(hidden)))
    else:
        hidden = hidden + attended
        added = layer.mlp(layer.post_attention_layernorm(hidden))
    output: Tensor = hidden + added
    return output if images is None else images.added(layer_idx, output)


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


def _attend(attention: Any, query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor | None = None) -> Tensor:
    """softmax(Q K^T · scale) V, where each of the last n rows sees keys up to its own. Gives `[1, n, heads · d]`."""
    num_groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(num_groups, dim=1), values.repeat_interleave(num_groups, dim=1)
    scale = getattr(attention.config, "query_pre_attn_scalar", attention.head_dim) ** -0.5
    scores = query @ keys.transpose(2, 3) * scale
    visible = _visible_keys(query.shape[2], keys.shape[2], getattr(attention, "sliding_window", None), blocks)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    attended: Tensor = weights @ values
    return attended.transpose(1, 2).flatten(2)


def _visible_keys(num_rows: int, num_keys: int, sliding_window: int | None, blocks: Tensor | None = None) -> Tensor:
    """Which of the keys each of the last `num_rows` positions sees, `[num_rows, num_keys]`."""
    row = torch.arange(num_keys - num_rows, num_keys).unsqueeze(1)
    key = torch.arange(num_keys).unsqueeze(0)
    visible = key <= row
    if blocks is not None:
        rows = blocks[len(blocks) - num_rows :].unsqueeze(1)
        visible[:, num_keys - len(blocks) :] |= (rows == blocks) & (rows > 0)
    return visible if sliding_window is None else visible & (key > row - sliding_window)
