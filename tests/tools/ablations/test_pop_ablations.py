"""POP's ablations against the golden, which has its own cache, mask and attention, and against deleted layers."""

from typing import Any

import pytest
import torch

from ablation_kit import ANSWER, MODELS, PROMPT, answer_rows, without
from calibration_kit import random_pieces
from pop_engine.builder.analysis.benefit import continuation_nll
from pop_engine.builder.reference import Reference
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.ablations.passing import passed_by
from pop_engine.tools.ablations.pop import no_boundary_prediction, pop_prediction
from pop_engine.tools.ablations.positions import first_layers, interleaved_layers, last_layers
from pop_engine.tools.ablations.predict import Predict, greedy_answer, plain_prediction
from pop_engine.tools.ablations.tail_kv import no_tail_kv_prediction
from pop_reference import decode, greedy, prefill_without

pytestmark = pytest.mark.usefixtures("one_torch_thread")
models = pytest.mark.parametrize("kind", MODELS)


@torch.no_grad()
def predicted(predict: Predict, prompt: list[int] = PROMPT, answer: list[int] = ANSWER) -> torch.Tensor:
    return predict(prompt, answer)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@models
@pytest.mark.parametrize("pruned", [(0, 1), (1, 3), (3, 4), (4,)])
def test_any_layers_can_be_pruned(kind: str, pruned: tuple[int, ...]) -> None:
    model = MODELS[kind]()
    expected = decode(model, prefill_without(model, PROMPT[:-1], pruned), [PROMPT[-1], *ANSWER[:-1]])
    assert_same(predicted(pop_prediction(model, pruned)), expected)


@models
def test_without_the_boundary(kind: str) -> None:
    """The first row is that of a model without the tail; the others see its rows of x_1 … x_N."""
    model, tail = MODELS[kind](), (3, 4)
    first = answer_rows(without(model, tail), PROMPT, ANSWER)[:1]
    rest = decode(model, prefill_without(model, PROMPT, tail), ANSWER[:-1])
    assert_same(predicted(no_boundary_prediction(model, tail)), torch.cat([first, rest]))
    assert_same(predicted(no_boundary_prediction(model, tail), PROMPT, ANSWER[:1]), first)


@models
def test_without_the_tail_s_keys_and_values(kind: str) -> None:
    model, tail = MODELS[kind](), (2, 3, 4)
    cache = prefill_without(model, PROMPT[:-1], tail)
    for layer_idx in tail:
        cache.keys[layer_idx] = cache.keys[layer_idx][:, :, :0]
        cache.values[layer_idx] = cache.values[layer_idx][:, :, :0]
    # The golden reads its position off layer 0, which is whole.
    expected = decode(model, cache, [PROMPT[-1], *ANSWER[:-1]])
    assert_same(predicted(no_tail_kv_prediction(model, tail)), expected)
    assert not torch.allclose(expected, predicted(pop_prediction(model, tail)), atol=0.1)
    assert model.config._attn_implementation == "sdpa"


@models
@pytest.mark.parametrize("removed", [(0, 1), (1, 3), (4,)])
def test_removed_layers_are_deleted_ones(kind: str, removed: tuple[int, ...]) -> None:
    model = MODELS[kind]()
    with passed_by(model, removed):
        found = predicted(plain_prediction(model))
    assert_same(found, answer_rows(without(model, removed), PROMPT, ANSWER))
    assert_same(predicted(plain_prediction(model)), answer_rows(model, PROMPT, ANSWER))


def test_pop_is_what_calibration_and_the_build_s_check_are_measured_with() -> None:
    model, piece, plan = MODELS["llama"](), random_pieces(1)[0], PrunePlan(5, 3)
    logits = predicted(pop_prediction(model, plan.tail), [*piece.prefix, *piece.context], list(piece.continuation))
    found = float(torch.nn.functional.cross_entropy(logits, torch.tensor(piece.continuation)))
    assert found == pytest.approx(continuation_nll(Reference(model, plan), piece), abs=1e-5)


@pytest.mark.parametrize("make", [pop_prediction, no_boundary_prediction, no_tail_kv_prediction])
def test_a_prompt_of_one_token(make: Any) -> None:
    model = MODELS["llama"]()
    found = predicted(make(model, (3, 4)), PROMPT[:1], ANSWER)
    expected = answer_rows(model, PROMPT[:1], ANSWER)
    # Without the boundary that token is pruned itself.
    assert torch.allclose(found, expected, atol=1e-3) == (make is not no_boundary_prediction)


def test_positions() -> None:
    plan = PrunePlan(30, 10)
    assert last_layers(plan) == tuple(range(20, 30))
    assert first_layers(plan) == tuple(range(10))
    assert interleaved_layers(plan) == tuple(range(2, 30, 3))
    assert interleaved_layers(PrunePlan(7, 3)) == (1, 3, 6)


def test_greedy_answers_end_with_a_stop_token() -> None:
    model = MODELS["llama"]()
    expected = greedy(model, PROMPT, 0, 8)
    assert greedy_answer(model, PROMPT, 8, frozenset()) == expected
    stop = expected[3]
    assert greedy_answer(model, PROMPT, 8, frozenset({stop})) == expected[: expected.index(stop) + 1]
