"""How much of a context's worth a pruned prefill keeps: the continuation, scored by the full model."""

from collections.abc import Sequence

import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from pop_engine.builder.analysis.corpus import Piece
from pop_engine.builder.reference import Reference, pruned_prefill


@torch.no_grad()
def continuation_nll(
    reference: Reference, piece: Piece, boundary_window: int = 1, *, with_context: bool = True
) -> float:
    """Nats a token of the piece's continuation, after its context is prefilled as the reference does it.

    The context's last `boundary_window` tokens and the continuation go through the full model against that cache
    (PAPER.md, Method). Without context, the full model reads nothing but the prefix and the context's last token
    before it.
    """
    cache = DynamicCache(config=reference.model.config)
    prompt = [*piece.prefix, *piece.context]
    boundary = prompt[-boundary_window:]
    if not with_context:
        boundary = [*piece.prefix, piece.context[-1]]
    elif context := prompt[:-boundary_window]:
        pruned_prefill(reference, context, cache)
    return decoded_nll(reference.model, cache, boundary, piece.continuation)


@torch.no_grad()
def decoded_nll(
    model: PreTrainedModel, cache: DynamicCache, boundary: Sequence[int], continuation: Sequence[int]
) -> float:
    """Nats a token of a continuation, when it and the boundary tokens before it go through the full model.

    The cache holds what comes before the boundary, and is written to.
    """
    rows = torch.tensor([[*boundary, *continuation[:-1]]])
    logits = model(input_ids=rows, cache=cache, use_cache=True, logits_to_keep=len(continuation)).logits
    return float(functional.cross_entropy(logits[0].float(), torch.tensor(continuation)))
