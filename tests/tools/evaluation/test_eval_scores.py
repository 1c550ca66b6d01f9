"""Means, standard errors and the benefit kept, against NumPy and the definitions."""

import numpy as np
import pytest

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.evaluation.message import AnswerScore
from pop_engine.tools.evaluation.result import SweepRow, is_within, longest_within
from pop_engine.tools.evaluation.scores import (
    DocumentScore,
    Scores,
    losses_by_position,
    mean_of,
    summarize,
)


def document(**changes: object) -> DocumentScore:
    values: dict[str, object] = {
        "line": 1,
        "num_prompt_tokens": 9,
        "num_answer_tokens": 4,
        "nll_full": 1.0,
        "nll_pop": 1.5,
        "nll_none": 3.0,
        "kl": 0.25,
        "top1_agreement": 0.75,
        "first_token_agrees": True,
        "greedy_matches": False,
        "num_equal_tokens": 2,
        "ttft_full_ms": 30.0,
        "ttft_pop_ms": 20.0,
        "prompt": "p",
        "reference": "r",
        "answer_full": "a b",
        "answer_pop": "a c",
    }
    return DocumentScore(**(values | changes))  # type: ignore[arg-type]


def scores(benefit: float | None) -> Scores:
    nll_pop = 3.0 if benefit is None else 3.0 - 2 * benefit
    return summarize([document(nll_pop=nll_pop, **({} if benefit is not None else {"nll_none": 0.5}))])


def test_means_and_standard_errors_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).normal(2, 3, 12)
    found = mean_of([float(value) for value in values])
    assert found.value == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / np.sqrt(12))
    assert mean_of([4.0]) == Estimate(4.0, 0.0)


def test_the_error_of_a_ratio_is_about_what_the_jackknife_says() -> None:
    generator = np.random.default_rng(1)
    below = generator.uniform(1, 3, 400)
    above = 0.8 * below + generator.normal(0, 0.3, 400)
    found = Estimate.of_ratio(above.tolist(), below.tolist())
    assert found is not None
    assert found.value == pytest.approx(above.sum() / below.sum())
    left_out = (above.sum() - above) / (below.sum() - below)
    jackknife = np.sqrt((399 / 400) * ((left_out - left_out.mean()) ** 2).sum())
    assert found.standard_error == pytest.approx(jackknife, rel=0.02)


def test_benefit_kept() -> None:
    found = Estimate.of_benefit([4.0, 5.0], [1.5, 2.0], [1.0, 2.0])
    assert found is not None
    assert found.value == pytest.approx((2.5 + 3.0) / (3.0 + 3.0))
    assert Estimate.of_benefit([1.0, 2.0], [1.0, 2.0], [1.5, 2.5]) is None


def test_every_document_counts_once() -> None:
    found = summarize(
        [
            document(num_answer_tokens=1, ttft_full_ms=10.0, ttft_pop_ms=10.0, greedy_matches=True),
            document(num_answer_tokens=99, nll_pop=2.5, kl=0.75, first_token_agrees=False),
        ]
    )
    assert (found.num_documents, found.num_answer_tokens) == (2, 100)
    assert found.nll_pop.value == 2.0
    assert found.kl.value == 0.5
    assert found.kl.standard_error == pytest.approx(0.25)
    assert found.first_token_agreement.value == found.exact_match.value == 0.5
    assert found.ttft_ratio.value == pytest.approx(40 / 30)
    assert found.ttft_saved_ms.value == 5.0
    assert found.benefit is not None
    assert found.benefit.value == pytest.approx((1.5 + 0.5) / (2 + 2))


def test_losses_by_position_are_means_over_those_that_reach_it() -> None:
    full = [AnswerScore((-1.0, -2.0)), AnswerScore((-3.0,))]
    pop = [AnswerScore((-2.0, -3.0)), AnswerScore((-4.0,))]
    none = [AnswerScore((-5.0, -6.0)), AnswerScore((-7.0,))]
    first, second = losses_by_position(full, pop, none)
    assert (first.num_documents, first.nll_full, first.nll_pop, first.nll_none) == (2, 2.0, 3.0, 6.0)
    assert (second.position, second.num_documents, second.nll_full, second.nll_none) == (1, 1, 2.0, 6.0)


@pytest.mark.parametrize(
    ("benefit", "limit", "expected"), [(0.96, 4.0, True), (0.95, 4.0, False), (0.5, None, None), (None, 4.0, False)]
)
def test_the_limit_of_the_loss(benefit: float | None, limit: float | None, expected: bool | None) -> None:
    assert is_within(None if benefit is None else Estimate(benefit, 0.01), limit) is expected


def test_the_longest_tail_within_the_limit() -> None:
    table = [(3, False, 0.99), (6, False, 0.96), (6, True, 0.98), (10, False, 0.8), (15, True, None)]
    rows = tuple(
        SweepRow(length, calibrated, is_within(found.benefit, 5.0), found, (), ())
        for length, calibrated, benefit in table
        for found in [scores(benefit)]
    )
    assert longest_within(rows) == 2
    assert longest_within(rows[3:]) is None
