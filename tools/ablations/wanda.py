"""Wanda: weights of the smallest |W| · ‖X‖ set to 0, row by row (Sun et al., arXiv 2306.11695, section 3)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pop_engine.builder.export.model import decoder_layers
from pop_engine.configs.errors import UsageError

DEFAULT_SPARSITY = 0.3


@contextmanager
def wanda_pruned(model: PreTrainedModel, token_ids: torch.Tensor, sparsity: float = DEFAULT_SPARSITY) -> Iterator[None]:
    """Within it that share of every row of the layers' matrices is 0; afterwards the weights are as they were.

    Norms are those of text [B, S], held in memory together. As in the paper, a layer's inputs come from layers that
    are pruned already. Raises UsageError where the layers hold no matrices.
    """
    weights = [weight for layer in decoder_layers(model) for weight in _matrices(layer).values()]
    if not weights:
        raise UsageError(f"wanda: the layers of {type(model).__name__} hold no linear modules; leave it out")
    originals = [weight.detach().clone() for weight in weights]
    try:
        _prune(model, token_ids, sparsity)
        yield
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


@torch.no_grad()
def _prune(model: PreTrainedModel, token_ids: torch.Tensor, sparsity: float) -> None:
    """One run over the text, in which each layer is pruned before it gives its output."""
    layers = decoder_layers(model)
    for layer in layers:
        layer.forward = _prune_first(layer, layer.forward, sparsity)
    try:
        model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
    finally:
        for layer in layers:
            del layer.forward


def least_scored(weight: torch.Tensor, input_norms: torch.Tensor, sparsity: float) -> torch.Tensor:
    """Where a matrix [out, in] is to be 0: in each row, the share with the smallest |W_ij| · ‖X_j‖."""
    scores = weight.abs() * input_norms
    chosen = scores.argsort(dim=1, stable=True)[:, : int(weight.shape[1] * sparsity)]
    return torch.zeros_like(weight, dtype=torch.bool).scatter(1, chosen, value=True)


def _prune_first(layer: nn.Module, run: Callable[..., Any], sparsity: float) -> Callable[..., Any]:
    """The layer's forward, which prunes the layer by what it is called with before it gives an output."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        for matrix, norms in _input_norms(layer, lambda: run(*args, **kwargs)).items():
            # Of a Conv1D this is a view, [out, in] too.
            rows = matrix.weight.T if isinstance(matrix, Conv1D) else matrix.weight
            rows.masked_fill_(least_scored(rows, norms, sparsity), 0)
        return run(*args, **kwargs)

    return forward


def _input_norms(layer: nn.Module, run: Callable[[], Any]) -> dict[Any, torch.Tensor]:
    """‖X_j‖ over all positions, of what each matrix of a layer reads while it runs."""
    squares: dict[Any, torch.Tensor] = {}

    def add(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        squares[module] = squares.get(module, 0) + args[0].flatten(0, -2).square().sum(0)

    handles = [module.register_forward_pre_hook(add) for module in _matrices(layer)]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {module: total.sqrt() for module, total in squares.items()}


def _matrices(layer: nn.Module) -> dict[nn.Module, torch.Tensor]:
    """A layer's linear modules and their weights."""
    return {module: module.weight for module in layer.modules() if isinstance(module, nn.Linear | Conv1D)}
