"""Scores of continuations against the golden, and the ratio estimator against the jackknife."""

from math import sqrt

import numpy as np
import pytest
import torch

from calibration_kit import random_model, random_pieces
from pop_engine.builder.analysis.benefit import continuation_nll
from pop_engine.builder.reference import Reference
from pop_engine.configs.calibration import Estimate
from pop_engine.configs.prune_plan import PrunePlan
from pop_reference import decode, empty_cache, pruned_prefill


def golden_nll(model: torch.nn.Module, piece, num_tail_layers: int, window: int) -> float:  # type: ignore[no-untyped-def]
    prompt = [*piece.prefix, *piece.context]
    cache = pruned_prefill(model, prompt[:-window], num_tail_layers)
    logits = decode(model, cache, [*prompt[-window:], *piece.continuation[:-1]])[window - 1 :]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(piece.continuation)))


@pytest.mark.parametrize("num_tail_layers", [0, 3])
@pytest.mark.parametrize("window", [1, 5])
def test_a_continuation_is_scored_after_the_pruned_context(num_tail_layers: int, window: int) -> None:
    model, piece = random_model(), random_pieces(1)[0]
    found = continuation_nll(Reference(model, PrunePlan(5, num_tail_layers)), piece, window)
    assert found == pytest.approx(golden_nll(model, piece, num_tail_layers, window), abs=1e-4)


def test_without_context_the_model_reads_prefix_and_last_token() -> None:
    model, piece = random_model(), random_pieces(1)[0]
    rows = [*piece.prefix, piece.context[-1], *piece.continuation[:-1]]
    logits = decode(model, empty_cache(model), rows)[-len(piece.continuation) :]
    expected = float(torch.nn.functional.cross_entropy(logits, torch.tensor(piece.continuation)))
    found = continuation_nll(Reference(model, PrunePlan(5, 0)), piece, with_context=False)
    assert found == pytest.approx(expected, abs=1e-4)


def test_benefit_is_a_ratio_of_sums_with_its_standard_error() -> None:
    random = np.random.default_rng(0)
    none, full = 5 + random.random(60), 3 + random.random(60)
    pruned = full + 0.2 * random.random(60)
    found = Estimate.of_benefit(list(none), list(pruned), list(full))
    assert found is not None
    assert found.value == pytest.approx((none - pruned).sum() / (none - full).sum())
    left_out = [np.delete(np.arange(60), index) for index in range(60)]
    ratios = np.array([(none - pruned)[kept].sum() / (none - full)[kept].sum() for kept in left_out])
    jackknife = sqrt(59 / 60 * ((ratios - ratios.mean()) ** 2).sum())
    assert found.standard_error == pytest.approx(jackknife, rel=0.05)


def test_a_context_that_is_worth_nothing_has_no_benefit() -> None:
    assert Estimate.of_benefit([1.0, 2.0], [1.0, 2.0], [1.5, 2.5]) is None
