"""POP with other layers pruned, and without its boundary (PAPER.md, Method and Ablations)."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from pop_engine.builder.export.boundary import ContextRows
from pop_engine.tools.ablations.passing import passed_by
from pop_engine.tools.ablations.predict import Predict, decode


def pop_prediction(model: PreTrainedModel, pruned: Collection[int], context_rows: ContextRows = nullcontext) -> Predict:
    """The paper's two steps: x_1 … x_N-1 through the pruned model, x_N and the answer through the full one."""

    def predict(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        cache = pruned_prefill(model, pruned, prompt[:-1], context_rows)
        return decode(model, cache, [prompt[-1], *answer[:-1]])

    return predict


def pruned_prefill(
    model: PreTrainedModel, pruned: Collection[int], context: Sequence[int], context_rows: ContextRows = nullcontext
) -> DynamicCache:
    """The cache after x_1 … x_N-1 have gone through the pruned model; empty where there are none."""
    cache = DynamicCache(config=model.config)
    if context:
        with passed_by(model, pruned, context_rows):
            model(input_ids=torch.tensor([list(context)]), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def no_boundary_prediction(model: PreTrainedModel, pruned: Collection[int]) -> Predict:
    """x_N through the pruned model too, which so gives the answer's first token; the rest is the full model's."""

    def predict(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with passed_by(model, pruned):
            output = model(input_ids=torch.tensor([list(prompt)]), cache=cache, use_cache=True, logits_to_keep=1)
        first: torch.Tensor = output.logits[0]
        return torch.cat([first, decode(model, cache, answer[:-1])]) if len(answer) > 1 else first

    return predict
