"""ShortGPT's choice of layers: Block Influence (Men et al., arXiv 2403.03853, section 3)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from pop_engine.builder.analysis.residual import layer_input, layer_output
from pop_engine.builder.export.model import decoder_layers


@torch.no_grad()
def block_influence(model: PreTrainedModel, token_ids: torch.Tensor) -> list[float]:
    """BI_l = 1 − E[cos(x_l, x_l+1)] of each layer, over all positions of text [B, S]."""
    found: list[float] = []

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        cosine = functional.cosine_similarity(layer_input(args, kwargs).double(), layer_output(output).double(), dim=-1)
        found.append(1 - float(cosine.mean()))

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in decoder_layers(model)]
    try:
        model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return found


def least_influential(influence: list[float], count: int) -> tuple[int, ...]:
    """Indices of the layers to remove: those of the lowest influence, in order."""
    ranked = sorted(range(len(influence)), key=lambda layer_idx: influence[layer_idx])
    return tuple(sorted(ranked[:count]))
