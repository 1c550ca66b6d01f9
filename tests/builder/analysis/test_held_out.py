"""Calibration is refused where it does not help, and named where it does."""

import pytest

from calibration_kit import random_model, random_pieces
from pop_engine.builder.analysis.calibrate import calibrated_reference
from pop_engine.builder.analysis.fit import fit_projections
from pop_engine.builder.analysis.held_out import HeldOutCheck, check_held_out
from pop_engine.builder.reference import Reference
from pop_engine.configs.calibration import LayerGain, ProjectionError
from pop_engine.configs.errors import EngineError
from pop_engine.configs.prune_plan import PrunePlan

PLAN = PrunePlan(5, 3)
BETTER, WORSE = ProjectionError(0.5, 0.1), ProjectionError(0.1, 0.5)


def quiet(done: int, total: int) -> None:
    pass


def test_errors_are_shares_of_the_variance() -> None:
    model = random_model()
    plain = Reference(model, PLAN)
    maps = fit_projections(model, PLAN, random_pieces(40), quiet)
    check = check_held_out(plain, calibrated_reference(plain, maps), random_pieces(5, seed=3), quiet)
    assert [gain.layer_idx for gain in check.layers] == [3, 4]
    for gain in check.layers:
        for error in (gain.key, gain.value):
            assert 0 < error.calibrated < error.plain < 3


def test_a_tail_that_is_right_already_is_refused() -> None:
    """Where the tail adds nothing, plain POP is exact, and a fit can only be worse."""
    model = random_model(idle_tail=3)
    plain = Reference(model, PLAN)
    maps = fit_projections(model, PLAN, random_pieces(20), quiet)
    check = check_held_out(plain, calibrated_reference(plain, maps), random_pieces(3, seed=3), quiet)
    with pytest.raises(EngineError, match="calibration refused: on held-out text K and V are off"):
        check.require_gain()


def check_of(error: ProjectionError, before: float, after: float) -> HeldOutCheck:
    return HeldOutCheck((LayerGain(3, error, error),), before, after, None, None)


def test_both_gains_are_required() -> None:
    check_of(BETTER, 3.0, 2.9).require_gain()
    with pytest.raises(EngineError, match=r"K and V are off by 0\.5 of their variance, without it by 0\.1"):
        check_of(WORSE, 3.0, 2.9).require_gain()
    for after in (3.0, 3.1, float("nan")):
        with pytest.raises(EngineError, match="calibration refused: held-out continuations cost"):
            check_of(BETTER, 3.0, after).require_gain()
