"""Which keys a layer may see, read off the mask that the model asks transformers for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class CausalMask:
    """Stands for the mask tensor between a model and its attention: causal, over the last `sliding_window` keys.

    0 means all keys. An object and not a tensor: whatever a model would compute with its mask fails the trace,
    instead of being left out of the graph.
    """

    sliding_window: int


@dataclass(frozen=True)
class UnsupportedMask:
    """Stands for a mask that no graph can hold, and says why. A model may make one and never use it."""

    reason: str


Mask = CausalMask | UnsupportedMask


def describe_mask(
    *,
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **unused: object,
) -> Mask:
    """The mask that a model asks for: causal, with or without a window, or unsupported.

    Called in place of transformers' mask builders, with their keyword arguments.
    """
    if attention_mask is not None:
        return UnsupportedMask("attention with a padding mask cannot be exported")
    for mask in (CausalMask(0), CausalMask(local_size or 0)):
        if _is_mask(mask_function, mask, local_size or 0):
            return mask
    return UnsupportedMask("the attention mask is not causal, or has chunks or blocks; only windows can be exported")


def _is_mask(mask_function: MaskFunction, mask: CausalMask, size: int) -> bool:
    """Whether a mask function is this mask: on every key, for the rows around each multiple of the window."""
    rows = sorted({max(0, edge + offset) for edge in (0, size, 2 * size, 3 * size) for offset in (-1, 0, 1, 7)})
    with _disable_current_modes():
        row = torch.tensor(rows)[:, None]
        key = torch.arange(rows[-1] + 2)[None]
        expected = key <= row
        if mask.sliding_window:
            expected &= key > row - mask.sliding_window
        try:
            found = mask_function(0, 0, row, key)
            return torch.equal(torch.as_tensor(found).expand(expected.shape), expected)
        except Exception:  # Whatever a mask of another kind does with plain indices: it is not this one.
            return False
