"""What every ablation comes down to: logits of an answer after a prompt."""

from collections.abc import Callable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

# From a prompt of at least one token and an answer of at least one: logits [len(answer), vocab_size], the first of
# which follow the prompt's last token. Call it without gradients.
Predict = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


def plain_prediction(model: PreTrainedModel) -> Predict:
    """The model as it is, in one call: what prunes prefill and decode alike needs no cache."""

    def predict(prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=len(answer)).logits
        return logits[0]

    return predict


def decode(model: PreTrainedModel, cache: DynamicCache, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [len(token_ids), vocab_size] of the full model over new tokens against a cache, which grows by them."""
    tokens = torch.tensor([list(token_ids)])
    logits: torch.Tensor = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=len(token_ids)).logits
    return logits[0]


def greedy_answer(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, stops: frozenset[int]) -> list[int]:
    """The full model's most likely answer, of `max_tokens` tokens or up to a token of `stops`, which is part of it."""
    cache = DynamicCache(config=model.config)
    answer: list[int] = []
    tokens = list(prompt)
    while len(answer) < max_tokens and not stops.intersection(answer):
        # Only the last row is looked at: a long prompt's logits would be larger than the model.
        logits = model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        answer += tokens
    return answer
