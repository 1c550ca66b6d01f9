"""SliceGPT: the residual stream without its smallest principal directions (Ashkboos et al., arXiv 2401.15024).

The paper folds each RMSNorm's scale into the weights behind it, turns the stream into the principal axes Q of what the
norms give out, cuts it to the first k of them, and joins blocks of different axes by adapters QᵀQ'. A stream of
k numbers y stands for the state x = y Q_kᵀ of the whole model: norms see the same length, and the cut weights read and
write the same numbers. So in the model's own axes slicing is a projection Q_k Q_kᵀ of the state wherever a norm reads
it. That is what is done here: it needs no weights of any form, and tied embeddings stay what they are. Tests compare it
with the cut weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pop_engine.builder.analysis.residual import ResidualStream
from pop_engine.builder.export.model import decoder_layers

DEFAULT_SHARE = 0.25


@contextmanager
def sliced(
    model: PreTrainedModel, token_ids: torch.Tensor, share: float = DEFAULT_SHARE
) -> Iterator[list[torch.Tensor]]:
    """Within it the model is sliced, by the axes of text [B, S], which are held in memory together.

    Gives the axes Q_k [hidden_size, k] of the embeddings, and of every sum of the residual stream, in order. As in the
    paper each is found in the model that is sliced before it.
    """
    axes = _Axes(share, is_centred=any(isinstance(module, nn.LayerNorm) for module in model.modules()))
    layers = decoder_layers(model)
    for layer_idx, layer in enumerate(layers):
        layer.forward = _slice(layer.forward, axes, is_first=layer_idx == 0)
    try:
        with torch.no_grad():
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
        axes.are_known = True
        yield axes.found
    finally:
        for layer in layers:
            del layer.forward


def principal_axes(states: torch.Tensor, count: int) -> torch.Tensor:
    """The first axes [D, count] of what an RMSNorm without scale makes of states [..., D]: section 3.3, C = Σ XᵀX."""
    normed = states.flatten(0, -2).double()
    normed = normed / normed.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    vectors: torch.Tensor = torch.linalg.eigh(normed.T @ normed).eigenvectors
    return vectors.flip(1)[:, :count].to(states.dtype)


class _Axes:
    """The axes of every place, found in the first run and used in all others."""

    def __init__(self, share: float, *, is_centred: bool) -> None:
        self.found: list[torch.Tensor] = []
        self.are_known = False
        self._share, self._is_centred = share, is_centred
        self._place = 0

    def begin(self) -> None:
        """Start a run at the embeddings."""
        self._place = 0

    def project(self, state: torch.Tensor) -> torch.Tensor:
        """The state [..., D] at the next place, without its smallest directions."""
        if self._is_centred:
            # LayerNorm takes the mean away first: section 3.1.
            state = state - state.mean(-1, keepdim=True)
        if not self.are_known:
            self.found.append(principal_axes(state, int(state.shape[-1] * (1 - self._share))))
        axes = self.found[self._place]
        self._place += 1
        return state @ axes @ axes.T


class _ProjectedStream(ResidualStream):
    def __init__(self, stream: torch.Tensor, axes: _Axes) -> None:
        super().__init__(stream)
        self._axes = axes

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self._axes.project(value)


def _slice(run: Callable[..., Any], axes: _Axes, *, is_first: bool) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_first:
            axes.begin()
            hidden_states = axes.project(hidden_states)
        with _ProjectedStream(hidden_states, axes):
            return run(hidden_states, *args, **kwargs)

    return forward
