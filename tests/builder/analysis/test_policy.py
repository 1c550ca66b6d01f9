"""Policies on curves whose answer is plain, and every form that is none."""

import pytest

from pop_engine.builder.analysis.policy import knee, parse_policy
from pop_engine.configs.calibration import Estimate
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan_file import ImportanceRecord

# Of 12 layers: flat up to a tail of 4, then steep.
LOSSES = (0.0, 0.0, 0.01, 0.02, 0.03, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def record(losses: tuple[float, ...] = LOSSES) -> ImportanceRecord:
    zeros = tuple(Estimate(0.0, 0.0) for _ in losses)
    estimates = tuple(Estimate(loss, 0.0) for loss in losses)
    return ImportanceRecord("model", None, "self", "", 0, "fp32", 2, 16, 4, 4.0, zeros, zeros, estimates)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("last-third", 4),
        ("knee", 4),
        ("ratio 0.5", 6),
        ("ratio 0", 0),
        ("budget 0", 1),
        ("budget 0.02", 3),
        ("budget 0.6", 5),
        ("budget 100", 11),
    ],
)
def test_the_tail_of_a_policy(words: str, expected: int) -> None:
    policy = parse_policy(words.split())
    assert str(policy) == words
    assert policy.choose(record()).num_tail_layers == expected


def test_a_budget_stops_where_it_is_first_exceeded() -> None:
    """Layers' effects may cancel in a longer tail; that is no ground to skip over a shorter one that costs too much."""
    losses = (0.0, 0.0, 0.5, 0.1, 0.9)
    assert parse_policy(["budget", "0.2"]).choose(record(losses)).num_tail_layers == 1


def test_a_knee_is_the_point_farthest_below_the_chord() -> None:
    assert knee([0, 0, 0, 0, 5, 10]) == 3
    assert knee([0, 0, 0]) == 2
    assert knee([0]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("best", "--policy best: expected last-third, knee, ratio R or budget NLL"),
        ("ratio", "--policy ratio: expected last-third"),
        ("knee 3", "--policy knee 3: expected last-third"),
        ("ratio much", "--policy ratio much: expected a number after ratio"),
        ("ratio 1", "--policy ratio 1: expected a ratio from 0"),
        ("budget -1", "--policy budget -1: expected a loss in nats"),
        ("budget nan", "--policy budget nan: expected a loss in nats"),
    ],
)
def test_a_policy_that_is_none(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_policy(words.split())
