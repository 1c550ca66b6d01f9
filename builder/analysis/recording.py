"""What the tail's K and V projections read and give in a forward pass, and who attends to what."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

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


@contextmanager
def recorded_attention(
    model: PreTrainedModel, layers: Sequence[KeyValueProjections]
) -> Iterator[dict[int, torch.Tensor]]:
    """Within it, each forward pass replaces these layers' attention weights, [num_attention_heads, S, S] by layer.

    Transformers' eager attention is the one that returns them, so the model runs on it meanwhile.
    """
    weights: dict[int, torch.Tensor] = {}

    def keep_weights(layer_idx: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...], output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 1 and isinstance(output[1], torch.Tensor):
                weights[layer_idx] = output[1][0]

        return hook

    chosen = model.config._attn_implementation
    model.set_attn_implementation("eager")
    handles = []
    try:
        for layer in layers:
            attention = model.get_submodule(layer.key_name.rpartition(".")[0])
            handles.append(attention.register_forward_hook(keep_weights(layer.layer_idx)))
        yield weights
    finally:
        model.set_attn_implementation(chosen)
        for handle in handles:
            handle.remove()
