"""How tail layers are traced: which rows only write their K and V, and which go through in full."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree

from pop_engine.builder.export.cache import RecordingCache

LayerForward = Callable[..., Any]
# What a tail layer runs within while it writes its context rows.
ContextRows = Callable[[], AbstractContextManager[None]]


def _with_hidden(output: Any, hidden_states: torch.Tensor) -> Any:
    """A layer's output with other hidden states, in the layer's form: alone, or first in a tuple."""
    return (hidden_states, *output[1:]) if isinstance(output, tuple) else hidden_states


class TwoStepTail:
    """The paper's prefill: a tail layer runs for its cache write alone and passes its input on.

    The exporter then drops all of it but norm, K/V projections, RoPE and the write.
    """

    def __init__(self, context_rows: ContextRows = nullcontext) -> None:
        self._within = context_rows

    def wrap(self, layers: list[nn.Module]) -> None:
        """Replace the forward of these tail layers."""
        for layer in layers:
            layer.forward = self._forward(layer.forward)

    def _forward(self, run: LayerForward) -> LayerForward:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self._within():
                output = run(hidden_states, *args, **kwargs)
            return _with_hidden(output, hidden_states)

        return forward


class OnePassTail:
    """The one-pass boundary: context rows only write, boundary rows run in full, in one call (PAPER.md, One-pass).

    `context_rows` and `boundary_rows` are row indices, [C] and [W]. Index tensors rather than slices: TensorRT
    must see a known row count, and a call may have no rows of either kind.

    Give the LM head of a model that shapes its layers' output by its input: the boundary rows are then put back to
    their places, and chosen again where the head begins.
    """

    def __init__(
        self, cache: RecordingCache, context_rows: ContextRows = nullcontext, head: nn.Module | None = None
    ) -> None:
        self._cache = cache
        self._within = context_rows
        self._head = head
        self._context: torch.Tensor | None = None
        self._context_rows: torch.Tensor | None = None
        self._boundary_rows: torch.Tensor | None = None

    def begin(self, context_rows: torch.Tensor | None, boundary_rows: torch.Tensor) -> None:
        """Start a trace from these graph inputs. Without a tail there are no context rows."""
        self._context = None
        self._context_rows, self._boundary_rows = context_rows, boundary_rows

    def wrap(self, layers: list[nn.Module], last: nn.Module) -> None:
        """Replace the forward of these tail layers; with none, of the last layer, so that one chooses the rows."""
        for layer in layers:
            layer.forward = self._forward(layer.forward)
        if self._head is not None:
            if layers:
                last.forward = self._put_back_rows(last.forward)
            self._head.forward = self._choose_rows_first(self._head.forward)
        elif not layers:
            last.forward = self._choose_rows(last.forward)

    def _forward(self, run: LayerForward) -> LayerForward:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._context_rows is not None
            assert self._boundary_rows is not None
            if self._context is None:
                self._num_rows = hidden_states.shape[1]
                self._context = hidden_states.index_select(1, self._context_rows)
                hidden_states = hidden_states.index_select(1, self._boundary_rows)
            with self._cache.holding_back(), self._within():
                run(self._context, *self._rows(args, self._context_rows), **self._rows(kwargs, self._context_rows))
            return run(hidden_states, *self._rows(args, self._boundary_rows), **self._rows(kwargs, self._boundary_rows))

        return forward

    def _choose_rows(self, run: LayerForward) -> LayerForward:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._boundary_rows is not None
            output = run(hidden_states, *args, **kwargs)
            full: torch.Tensor = output[0] if isinstance(output, tuple) else output
            return _with_hidden(output, full.index_select(1, self._boundary_rows))

        return forward

    def _choose_rows_first(self, run: LayerForward) -> LayerForward:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._boundary_rows is not None
            return run(hidden_states.index_select(1, self._boundary_rows), *args, **kwargs)

        return forward

    def _put_back_rows(self, run: LayerForward) -> LayerForward:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self._boundary_rows is not None
            output = run(hidden_states, *args, **kwargs)
            rows: torch.Tensor = output[0] if isinstance(output, tuple) else output
            places = rows.new_zeros(rows.shape[0], self._num_rows, rows.shape[2])
            return _with_hidden(output, places.index_copy(1, self._boundary_rows, rows))

        return forward

    def _rows(self, arguments: Any, rows: torch.Tensor) -> Any:
        """A layer's other arguments (rotary tables, position ids) at these rows: whatever has the rows as axis 1."""

        def choose(leaf: Any) -> Any:
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.ndim >= 2
                and statically_known_true(leaf.shape[1] == self._num_rows)
            ):
                return leaf.index_select(1, rows)
            return leaf

        # The cache is a leaf here and passes through.
        return _pytree.tree_map(choose, arguments)
