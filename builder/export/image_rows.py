"""How image features enter a language model: in place of token embeddings, and by DeepStack after the first layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def embed_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, image_ids: torch.Tensor, image_embeds: torch.Tensor
) -> torch.Tensor:
    """Embeddings [B, S, hidden_size]: an image's where `image_ids` is not 0, the tokens' elsewhere."""
    embed = model.get_input_embeddings()
    assert isinstance(embed, nn.Module)
    return torch.where(image_ids[..., None] > 0, image_embeds, embed(input_ids))


class DeepStack:
    """Adds image features to the output of the first layers (DeepStack, arXiv:2406.04334; HF Qwen3VLTextModel).

    Hugging Face adds them at a boolean index, which a graph cannot hold; features that are zero elsewhere do the
    same.
    """

    def __init__(self) -> None:
        self._features: torch.Tensor | None = None

    def begin(self, features: torch.Tensor) -> None:
        """Start a trace from these features, [num_deepstack, B, S, hidden_size]."""
        self._features = features

    def wrap(self, layers: list[nn.Module]) -> None:
        """Replace the forward of these layers, the model's first."""
        for layer_idx, layer in enumerate(layers):
            layer.forward = self._forward(layer.forward, layer_idx)

    def _forward(self, run: Callable[..., Any], layer_idx: int) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._features is not None
            output = run(hidden_states, *args, **kwargs)
            if isinstance(output, tuple):
                return (output[0] + self._features[layer_idx], *output[1:])
            return output + self._features[layer_idx]

        return forward
