"""Virtual gates: one factor on both residual branches of every layer (PAPER.md, Virtual gates), in any model.

A layer's branches are found while it runs: whatever is added to what came in is a branch. So pre-norm, post-norm and
parallel blocks need no code of their own.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from pop_engine.builder.export.model import decoder_layers
from pop_engine.configs.errors import UsageError

_SUMS = frozenset({torch.add, torch.Tensor.add, torch.Tensor.add_})
# What gives the residual stream back as it was, perhaps in another shape.
_UNCHANGED = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.contiguous, functional.dropout})
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
            given = args[0] if args else kwargs["hidden_states"]
            if not torch.equal(_hidden(output), given):
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
        if not residual.num_branches or not residual.carries(_hidden(output)):
            raise UsageError(refusal)
        return output

    return forward


def _hidden(output: Any) -> torch.Tensor:
    """A layer's hidden states: its output, or the first of a tuple."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class _ResidualGate(TorchFunctionMode):
    """Follows the residual stream through one layer's forward and multiplies what is added to it."""

    def __init__(self, stream: torch.Tensor, factors: torch.Tensor) -> None:
        self.num_branches = 0
        # The tensors, not their ids: those are given to others once a tensor is gone.
        self._stream = [stream]
        self._factors = factors

    def carries(self, value: object) -> bool:
        """Whether this is the stream."""
        return any(value is tensor for tensor in self._stream)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_sum = func in _SUMS and self._adds_branch(args)
        if is_sum:
            self.num_branches += 1
            args = tuple(value if self.carries(value) else value * self._factors for value in args)
        result = func(*args, **(kwargs or {}))
        if is_sum or (func in _UNCHANGED and self.carries(args[0])):
            self._stream.append(result)
        return result

    def _adds_branch(self, args: tuple[Any, ...]) -> bool:
        return (
            len(args) == 2
            and all(isinstance(value, torch.Tensor) for value in args)
            and args[0].shape == args[1].shape
            and self.carries(args[0]) != self.carries(args[1])
        )
