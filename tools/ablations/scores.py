"""How well a variant answers, document by document, against the full model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.ablations.predict import Predict, greedy_answer, plain_prediction
from pop_engine.tools.evaluation.data import Document
from pop_engine.tools.evaluation.scores import mean_of

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scored:
    """One document: a prompt with the answer that is scored. NLL is in nats a token, a mean over the answer.

    `most_likely` are the full model's most likely tokens at the answer's places.
    """

    line: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    nll_full: float
    nll_none: float
    most_likely: tuple[int, ...]


@dataclass(frozen=True)
class VariantScores:
    """Means over documents. `benefit` is the share kept of what the context is worth (PAPER.md's is None).

    Agreement is that of the most likely token with the full model's. `nlls` are the documents', in order.
    """

    nll: Estimate
    benefit: Estimate | None
    top1_agreement: Estimate
    first_token_agreement: Estimate
    nlls: tuple[float, ...]


@torch.no_grad()
def score_full(
    model: PreTrainedModel, documents: Sequence[Document], max_tokens: int, stops: frozenset[int], progress: Progress
) -> tuple[Scored, ...]:
    """The full model with the prompt and without it; where a document has no answer, its greedy one is scored."""
    predict, found = plain_prediction(model), []
    for done, document in enumerate(documents, 1):
        answer = document.answer or tuple(greedy_answer(model, document.prompt, max_tokens, stops))
        logits = predict(document.prompt, answer)
        found.append(
            Scored(
                line=document.line,
                prompt=document.prompt,
                answer=answer,
                nll_full=_nll(logits, answer),
                nll_none=_nll(predict(document.without_context, answer), answer),
                most_likely=tuple(logits.argmax(-1).tolist()),
            )
        )
        progress(done, len(documents))
    return tuple(found)


@torch.no_grad()
def score_variant(predict: Predict, documents: Sequence[Scored], progress: Progress) -> VariantScores:
    """A variant over all documents."""
    nlls, agreement, first = [], [], []
    for done, document in enumerate(documents, 1):
        logits = predict(document.prompt, document.answer)
        nlls.append(_nll(logits, document.answer))
        same = [a == b for a, b in zip(logits.argmax(-1).tolist(), document.most_likely, strict=True)]
        agreement.append(sum(same) / len(same))
        first.append(float(same[0]))
        progress(done, len(documents))
    return VariantScores(
        nll=mean_of(nlls),
        benefit=Estimate.of_benefit(
            [document.nll_none for document in documents], nlls, [document.nll_full for document in documents]
        ),
        top1_agreement=mean_of(agreement),
        first_token_agreement=mean_of(first),
        nlls=tuple(nlls),
    )


def _nll(logits: torch.Tensor, answer: Sequence[int]) -> float:
    return float(functional.cross_entropy(logits.float(), torch.tensor(answer)))
