"""Virtual gates: one factor on both residual branches of every layer (PAPER.md, Virtual gates), in any model.

A layer's branches are found while it runs (residual.py), so no block needs code of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pop_engine.builder.analysis.residual import ResidualStream, layer_input, layer_output
from pop_engine.builder.export.model import decoder_layers
from pop_engine.configs.errors import UsageError

_NUM_CHECK_TOKENS = 8

_Forward = Callable[..., Any]


@contextmanager
def gated(model: PreTrainedModel, gates: torch.Tensor, prefill_len: int) -> Iterator[None]:
    """Within it the model has gates, [layers, 2]: of the first `prefill_len` rows, and of those after them.

    For one sequence a call. Its forward raises UsageError where a layer does more than add to what passes it.
    """
    layers = decoder_layers(model)
    for layer_idx, layer in enumerate(layers):
        layer.forward = _gate(layer.forward, gates[layer_idx], prefill_len, _refusal(model, layer_idx))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@torch.no_grad()
def check_gates(model: PreTrainedModel) -> None:
    """Raise UsageError unless gates of 1 change nothing, to the bit, and gates of 0 take every layer away."""
    num_layers = len(decoder_layers(model))
    tokens = torch.arange(1, _NUM_CHECK_TOKENS + 1)[None]
    plain = model(input_ids=tokens, use_cache=False).logits
    with gated(model, torch.ones(num_layers, 2), _NUM_CHECK_TOKENS // 2):
        ones = model(input_ids=tokens, use_cache=False).logits
    if not torch.equal(plain, ones):
        raise UsageError(f"{type(model).__name__}: gates of 1 change its logits; it cannot be analyzed")
    with gated(model, torch.zeros(num_layers, 2), 0), _identity_required(model):
        model(input_ids=tokens, use_cache=False)


@contextmanager
def _identity_required(model: PreTrainedModel) -> Iterator[None]:
    def hook_of(layer_idx: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
            if not torch.equal(layer_output(output), layer_input(args, kwargs)):
                raise UsageError(_refusal(model, layer_idx))

        return hook

    handles = [
        layer.register_forward_hook(hook_of(layer_idx), with_kwargs=True)
        for layer_idx, layer in enumerate(decoder_layers(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refusal(model: PreTrainedModel, layer_idx: int) -> str:
    return (
        f"{type(model).__name__}: layer {layer_idx} does more than add to what passes it, so a gate cannot stand for "
        "its removal; it cannot be analyzed, choose its tail with --tail-layers"
    )


def _gate(run: _Forward, gate: torch.Tensor, prefill_len: int, refusal: str) -> _Forward:
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_prefill = torch.arange(hidden_states.shape[1], device=gate.device) < prefill_len
        factors = torch.where(is_prefill, gate[0], gate[1])[:, None].to(hidden_states)
        with _ResidualGate(hidden_states, factors) as residual:
            output = run(hidden_states, *args, **kwargs)
        if not residual.num_branches or not residual.carries(layer_output(output)):
            raise UsageError(refusal)
        return output

    return forward


class _ResidualGate(ResidualStream):
    """Multiplies what is added to the residual stream."""

    def __init__(self, stream: torch.Tensor, factors: torch.Tensor) -> None:
        super().__init__(stream)
        self._factors = factors

    def branch(self, value: torch.Tensor) -> torch.Tensor:
        return value * self._factors
