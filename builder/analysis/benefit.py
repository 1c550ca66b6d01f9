"""How much of a context's worth a pruned prefill keeps: the continuation, scored by the full model."""

import torch
from torch.nn import functional
from transformers import DynamicCache

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
    model = reference.model
    cache = DynamicCache(config=model.config)
    prompt = [*piece.prefix, *piece.context]
    boundary = prompt[-boundary_window:]
    if not with_context:
        boundary = [*piece.prefix, piece.context[-1]]
    elif context := prompt[:-boundary_window]:
        pruned_prefill(reference, context, cache)
    targets = torch.tensor(piece.continuation)
    rows = torch.tensor([[*boundary, *piece.continuation[:-1]]])
    logits = model(input_ids=rows, cache=cache, use_cache=True, logits_to_keep=len(targets)).logits
    return float(functional.cross_entropy(logits[0].float(), targets))
