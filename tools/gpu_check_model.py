"""POP on a Hugging Face decoder in plain PyTorch, with one static cache, so that CUDA graphs can hold its calls.

The model gives its modules: norms, projections, rotary table and MLP. Layers are Llama-like: pre-norm, gated or plain
MLP, optional q_norm and k_norm (Qwen3), no windows. PAPER.md, Method, is what is computed.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# A Hugging Face causal LM and its layers, which are reached by name.
Model = Any
Layer = Any
Rotary = tuple[Tensor, Tensor]


class PopDecoder:
    """A model, its tail and a cache [B, H_kv, max_seq_len, D] per layer for K and for V, written from row 0 on.

    Tokens are [B, rows]; logits are those of the last row, [B, vocab_size].
    """

    def __init__(self, model: Model, num_tail_layers: int, batch_size: int, max_seq_len: int) -> None:
        self._model = model
        self._layers: list[Layer] = list(model.model.layers)
        self._num_trunk_layers = len(self._layers) - num_tail_layers
        projection, head_dim = self._layers[0].self_attn.k_proj, self._layers[0].self_attn.head_dim
        shape = (batch_size, projection.out_features // head_dim, max_seq_len, head_dim)
        place = {"dtype": projection.weight.dtype, "device": projection.weight.device}
        self._keys = [torch.zeros(shape, **place) for _ in self._layers]
        self._values = [torch.zeros(shape, **place) for _ in self._layers]

    def full(self, tokens: Tensor) -> Tensor:
        """Prefill with nothing pruned: the baseline."""
        hidden, rotary = self._embed(tokens, 0)
        for layer_idx in range(len(self._layers)):
            hidden = self._run_layer(layer_idx, hidden, rotary, 0)
        return self._logits(hidden)

    def one_pass(self, tokens: Tensor) -> Tensor:
        """The trunk over all rows; in the tail K and V of all rows but the last, which goes through it in full."""
        hidden, rotary = self._embed(tokens, 0)
        num_context = tokens.shape[1] - 1
        for layer_idx in range(self._num_trunk_layers):
            hidden = self._run_layer(layer_idx, hidden, rotary, 0)
        context, last = hidden[:, :num_context], hidden[:, num_context:]
        context_rotary, last_rotary = _rows(rotary, slice(0, num_context)), _rows(rotary, slice(num_context, None))
        for layer_idx in range(self._num_trunk_layers, len(self._layers)):
            self._write(layer_idx, self._layers[layer_idx].input_layernorm(context), context_rotary, 0)
            last = self._run_layer(layer_idx, last, last_rotary, num_context)
        return self._logits(last)

    def two_step(self, tokens: Tensor) -> Tensor:
        """The paper's form: the pruned model over all rows but the last, then the last as a decode step."""
        num_context = tokens.shape[1] - 1
        hidden, rotary = self._embed(tokens[:, :num_context], 0)
        for layer_idx in range(self._num_trunk_layers):
            hidden = self._run_layer(layer_idx, hidden, rotary, 0)
        for layer_idx in range(self._num_trunk_layers, len(self._layers)):
            self._write(layer_idx, self._layers[layer_idx].input_layernorm(hidden), rotary, 0)
        return self.decode(tokens[:, num_context:], num_context)

    def decode(self, tokens: Tensor, cache_len: int) -> Tensor:
        """One new token [B, 1] through the full model."""
        hidden, rotary = self._embed(tokens, cache_len)
        for layer_idx in range(len(self._layers)):
            hidden = self._run_layer(layer_idx, hidden, rotary, cache_len)
        return self._logits(hidden)

    def _embed(self, tokens: Tensor, start: int) -> tuple[Tensor, Rotary]:
        hidden: Tensor = self._model.model.embed_tokens(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        cos, sin = self._model.model.rotary_emb(hidden, positions)
        return hidden, (cos, sin)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.lm_head(self._model.model.norm(hidden[:, -1]))
        return logits

    def _run_layer(self, layer_idx: int, hidden: Tensor, rotary: Rotary, start: int) -> Tensor:
        """Attention over everything up to these rows, which stand at `start`, then the MLP."""
        layer, rows = self._layers[layer_idx], hidden.shape[1]
        normed = layer.input_layernorm(hidden)
        self._write(layer_idx, normed, rotary, start)
        assert start == 0 or rows == 1, "causality is counted from the first row"
        attended = scaled_dot_product_attention(
            _rope(_heads(layer, normed, "q"), rotary),
            self._keys[layer_idx][:, :, : start + rows],
            self._values[layer_idx][:, :, : start + rows],
            is_causal=start == 0 and rows > 1,
            enable_gqa=True,
        )
        hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        output: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output

    def _write(self, layer_idx: int, normed: Tensor, rotary: Rotary, start: int) -> None:
        """K and V of rows that have passed the layer's input norm."""
        layer, rows = self._layers[layer_idx], slice(start, start + normed.shape[1])
        self._keys[layer_idx][:, :, rows] = _rope(_heads(layer, normed, "k"), rotary)
        self._values[layer_idx][:, :, rows] = _heads(layer, normed, "v")


def num_decode_weights(model: Model) -> int:
    """Weights that a decode step reads: all but the embedding's, of which it reads a row."""
    embedding = model.model.embed_tokens.weight
    is_tied = model.lm_head.weight is embedding
    total = sum(weight.numel() for weight in model.parameters())
    return int(total if is_tied else total - embedding.numel())


def _heads(layer: Layer, normed: Tensor, kind: str) -> Tensor:
    """Project [B, n, hidden] to [B, heads, n, D], and norm each head where the layer does."""
    attention = layer.self_attn
    split: Tensor = getattr(attention, f"{kind}_proj")(normed).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{kind}_norm", None)
    heads: Tensor = split if norm is None else norm(split)
    return heads.transpose(1, 2)


def _rope(heads: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (table.unsqueeze(1) for table in rotary)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _rows(rotary: Rotary, rows: slice) -> Rotary:
    return rotary[0][:, rows], rotary[1][:, rows]
