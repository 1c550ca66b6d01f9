"""The residual stream of one layer, followed while the layer runs.

Whatever is added to what came in is a branch, and the sum is the stream again. So pre-norm, post-norm and parallel
blocks need no code of their own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SUMS = frozenset({torch.add, torch.Tensor.add, torch.Tensor.add_})
# What gives the residual stream back as it was, perhaps in another shape.
_UNCHANGED = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.contiguous, functional.dropout})


class ResidualStream(TorchFunctionMode):
    """Follows the stream from a layer's input on. What inherits from it may change branches and sums."""

    def __init__(self, stream: torch.Tensor) -> None:
        self.num_branches = 0
        # The tensors, not their ids: those are given to others once a tensor is gone.
        self._stream = [stream]

    def branch(self, value: torch.Tensor) -> torch.Tensor:
        """What is added to the stream in place of a branch."""
        return value

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """What the stream goes on with after a sum."""
        return value

    def carries(self, value: object) -> bool:
        """Whether this is the stream."""
        return any(value is tensor for tensor in self._stream)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_sum = func in _SUMS and self._adds_branch(args)
        if is_sum:
            self.num_branches += 1
            args = tuple(value if self.carries(value) else self.branch(value) for value in args)
        result = func(*args, **(kwargs or {}))
        if is_sum:
            result = self.sum(result)
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


def layer_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states that a layer is called with."""
    given: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return given


def layer_output(output: Any) -> torch.Tensor:
    """A layer's hidden states: its output, or the first of a tuple."""
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
