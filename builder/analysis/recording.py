"""What the tail's K and V projections read and give in a forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pop_engine.builder.export.projections import KeyValueProjections


@dataclass
class Recording:
    """One forward pass, rows flattened. `state` is what the first tail layer's projections read.

    `outputs` are K and V of one layer after another, as projected: before k_norm and RoPE.
    """

    state: torch.Tensor | None = None
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)


@contextmanager
def recorded(tail: Sequence[KeyValueProjections]) -> Iterator[Recording]:
    """Within it, each forward pass of the model replaces what is recorded."""
    recording = Recording()

    def keep_state(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        recording.state = arguments[0].flatten(0, -2)

    def keep_output(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            recording.outputs[name] = output.flatten(0, -2)

        return hook

    handles = [tail[0].key.register_forward_pre_hook(keep_state)]
    handles += [
        projection.register_forward_hook(keep_output(name)) for layer in tail for name, projection in layer.named()
    ]
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()
