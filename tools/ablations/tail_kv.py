"""POP whose tail leaves out K and V: at decode its layers see nothing of the prompt but x_N (PAPER.md, Ablations)."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from transformers import PreTrainedModel

from pop_engine.builder.analysis.residual import layer_input
from pop_engine.builder.export.model import decoder_layers
from pop_engine.configs.errors import EngineError
from pop_engine.tools.ablations.pop import pruned_prefill
from pop_engine.tools.ablations.predict import Predict, decode


def no_tail_kv_prediction(model: PreTrainedModel, pruned: Collection[int]) -> Predict:
    """POP, but what the pruned layers wrote is hidden from them at decode, as if it had not been written."""

    def predict(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        cache = pruned_prefill(model, pruned, prompt[:-1])
        with _mask_given(model), _past_hidden(model, pruned):
            return decode(model, cache, [prompt[-1], *answer[:-1]])

    return predict


@contextmanager
def _mask_given(model: PreTrainedModel) -> Iterator[None]:
    """Within it, layers are given their mask as numbers; other implementations may leave it out, or pack it."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


@contextmanager
def _past_hidden(model: PreTrainedModel, pruned: Collection[int]) -> Iterator[None]:
    """Within it, the rows of a call see each other in these layers, and nothing that the cache held before."""
    handles = [
        layer.register_forward_pre_hook(_hide_past, with_kwargs=True)
        for layer_idx, layer in enumerate(decoder_layers(model))
        if layer_idx in pruned
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hide_past(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    num_rows = layer_input(args, kwargs).shape[1]
    num_masks = 0

    def hide(leaf: Any) -> Any:
        # The one argument of four dimensions, [B, H or 1, rows, keys], of which the call's own rows come last.
        nonlocal num_masks
        if not isinstance(leaf, torch.Tensor) or leaf.ndim != 4 or leaf.shape[2] != num_rows:
            return leaf
        num_masks += 1
        hidden = leaf.clone()
        hidden[..., :-num_rows] = torch.finfo(leaf.dtype).min
        return hidden

    changed = _pytree.tree_map(hide, (args, kwargs))
    if num_masks != 1:
        raise EngineError(f"no-tail-kv: {type(layer).__name__} is given {num_masks} masks, expected one; leave it out")
    return changed[0], changed[1]
