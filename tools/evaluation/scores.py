"""What an evaluation measures: each document's scores, and their means with standard errors over documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.evaluation.message import AnswerScore


@dataclass(frozen=True)
class DocumentScore:
    """One document. NLL and KL are in nats a token, means over the answer's tokens.

    `nll_full` and `nll_none` are the full model's with the prompt and without it; KL, in nats, is of POP from the full
    model. `num_equal_tokens` is how far the two greedy answers, cut at --max-tokens, are the same. `reference` is the
    answer that was scored: the file's, or the full model's greedy one.
    """

    line: int
    num_prompt_tokens: int
    num_answer_tokens: int
    nll_full: float
    nll_pop: float
    nll_none: float
    kl: float
    top1_agreement: float
    first_token_agrees: bool
    greedy_matches: bool
    num_equal_tokens: int
    ttft_full_ms: float
    ttft_pop_ms: float
    prompt: str
    reference: str
    answer_full: str
    answer_pop: str


@dataclass(frozen=True)
class Scores:
    """Over all documents, each counting once.

    `benefit` is Σ(NLL without context − NLL) / Σ(NLL without − NLL full), None where the context is worth nothing to
    the full model. `ttft_ratio` is the full engine's time over POP's, and `ttft_saved_ms` their mean difference.
    """

    num_documents: int
    num_answer_tokens: int
    nll_full: Estimate
    nll_pop: Estimate
    nll_none: Estimate
    benefit: Estimate | None
    kl: Estimate
    top1_agreement: Estimate
    first_token_agreement: Estimate
    exact_match: Estimate
    ttft_full_ms: Estimate
    ttft_pop_ms: Estimate
    ttft_saved_ms: Estimate
    ttft_ratio: Estimate


@dataclass(frozen=True)
class PositionLoss:
    """Mean NLL at one position of the answers, over the `num_documents` that reach it."""

    position: int
    num_documents: int
    nll_full: float
    nll_pop: float
    nll_none: float


def summarize(documents: Sequence[DocumentScore]) -> Scores:
    """Means over at least one document."""
    full = [document.nll_full for document in documents]
    pop = [document.nll_pop for document in documents]
    none = [document.nll_none for document in documents]
    ttft_full = [document.ttft_full_ms for document in documents]
    ttft_pop = [document.ttft_pop_ms for document in documents]
    ratio = Estimate.of_ratio(ttft_full, ttft_pop)
    assert ratio is not None, "a prefill takes time"
    return Scores(
        num_documents=len(documents),
        num_answer_tokens=sum(document.num_answer_tokens for document in documents),
        nll_full=mean_of(full),
        nll_pop=mean_of(pop),
        nll_none=mean_of(none),
        benefit=Estimate.of_benefit(none, pop, full),
        kl=mean_of([document.kl for document in documents]),
        top1_agreement=mean_of([document.top1_agreement for document in documents]),
        first_token_agreement=mean_of([document.first_token_agrees for document in documents]),
        exact_match=mean_of([document.greedy_matches for document in documents]),
        ttft_full_ms=mean_of(ttft_full),
        ttft_pop_ms=mean_of(ttft_pop),
        ttft_saved_ms=mean_of([a - b for a, b in zip(ttft_full, ttft_pop, strict=True)]),
        ttft_ratio=ratio,
    )


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean and standard error; of one value the error is unknown, and given as 0."""
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(fmean(values), error)


def mean_nll(score: AnswerScore) -> float:
    """Nats a token of one answer."""
    return -fmean(score.logprobs)


def losses_by_position(
    full: Sequence[AnswerScore], pop: Sequence[AnswerScore], none: Sequence[AnswerScore]
) -> tuple[PositionLoss, ...]:
    """How the loss goes along the answers."""
    losses = []
    for position in range(max(len(score.logprobs) for score in full)):
        reaching = [idx for idx, score in enumerate(full) if len(score.logprobs) > position]
        means = (-fmean(side[idx].logprobs[position] for idx in reaching) for side in (full, pop, none))
        losses.append(PositionLoss(position, len(reaching), *means))
    return tuple(losses)
