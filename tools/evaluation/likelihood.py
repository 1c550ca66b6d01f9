"""How likely an engine finds given answers: the prompt prefilled, the answer fed through decode token by token."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.engine import Engine
from pop_engine.tools.evaluation.message import Case

# Enough for decode to pay for its read of the weights; more only takes memory.
MAX_GROUP = 8


def group_size(max_batch_size: int) -> int:
    """How many cases are scored together on an engine of so many slots."""
    return min(max_batch_size, MAX_GROUP)


def walk_answers(engine: Engine, cases: Sequence[Case]) -> Iterator[tuple[int, int, NDArray[np.float32]]]:
    """Yield (case, position, logits [vocab_size] of the answer's token there), each case's positions in order.

    The first logits come from prefill, all others from decode steps over all cases together. A row is only good
    until the next. Slots are given back however it ends.
    """
    slots: list[int] = []
    try:
        for case_idx, case in enumerate(cases):
            slots.append(engine.allocate_slot())
            yield case_idx, 0, engine.prefill(slots[-1], case.prompt)
        for position in range(1, max((len(case.answer) for case in cases), default=0)):
            active = [idx for idx, case in enumerate(cases) if len(case.answer) > position]
            tokens = [cases[idx].answer[position - 1] for idx in active]
            logits = engine.decode_step([slots[idx] for idx in active], tokens)
            for case_idx, row in zip(active, logits, strict=True):
                yield case_idx, position, row
    finally:
        for slot in slots:
            engine.free_slot(slot)


def answer_likelihood(engine: Engine, cases: Sequence[Case]) -> list[tuple[float, bool]]:
    """Log-likelihood of each answer in nats, summed over its tokens, and whether greedy decoding would give it."""
    totals, greedy = [0.0] * len(cases), [True] * len(cases)
    for start in range(0, len(cases), size := group_size(engine.manifest.limits.max_batch_size)):
        group = cases[start : start + size]
        for case_idx, position, logits in walk_answers(engine, group):
            token = group[case_idx].answer[position]
            totals[start + case_idx] += float(log_softmax(logits)[token])
            greedy[start + case_idx] &= int(logits.argmax()) == token
    return list(zip(totals, greedy, strict=True))


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Log-probabilities of a row of logits [vocab_size], in double: they are summed over long answers."""
    shifted: NDArray[np.float64] = logits.astype(np.float64) - float(logits.max())
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def divergence(expected: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Kullback-Leibler divergence of `found` from `expected`, both log-probabilities [vocab_size], in nats."""
    return float((np.exp(expected) * (expected - found)).sum())
