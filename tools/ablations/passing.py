"""Layers that only write their K and V, at any position: POP's prefill, and without a cache the removal of layers."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext

from transformers import PreTrainedModel

from pop_engine.builder.export.boundary import ContextRows, TwoStepTail
from pop_engine.builder.export.model import decoder_layers


@contextmanager
def passed_by(
    model: PreTrainedModel, pruned: Collection[int], context_rows: ContextRows = nullcontext
) -> Iterator[None]:
    """Within it, the layers of these indices write K and V of what reaches them and pass it on unchanged.

    Where there is no cache, nothing is left of them: they are removed.
    """
    layers = [layer for layer_idx, layer in enumerate(decoder_layers(model)) if layer_idx in pruned]
    TwoStepTail(context_rows).wrap(layers)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
