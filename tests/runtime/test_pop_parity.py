"""The POP engine against the independent reference: logits and the whole cache, both boundaries, every plan."""

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from engine_kit import (
    BOUNDARIES,
    DEEP,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    PLANS,
    SMALL,
    Plan,
    TinyModels,
    cached,
    random_tokens,
    relative_error,
    stacked,
    taken_slots,
)
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary
from pop_engine.runtime import Engine
from pop_reference import ReferenceCache, decode, one_pass_prefill, pop_prefill

# fp32, in units of the largest magnitude.
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("one_torch_thread")
NUM_DECODE_STEPS = 4
plans = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"tail{plan[1]}of{plan[0]}")
boundaries = pytest.mark.parametrize("boundary", BOUNDARIES)


def assert_same_cache(engine: Engine, slot: int, expected: ReferenceCache) -> None:
    assert relative_error(cached(engine, slot), stacked(expected)) < TOLERANCE


@plans
@boundaries
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 29, MAX_SEQ_LEN - NUM_DECODE_STEPS])
def test_prefill_and_decode_equal_the_reference(
    tiny: TinyModels, plan: Plan, boundary: Boundary, num_tokens: int
) -> None:
    engine, model = tiny.engine(plan, boundary), tiny.hf_model(plan[0])
    prompt = random_tokens(num_tokens, seed=num_tokens)
    expected, cache = (one_pass_prefill if boundary == "one-pass" else pop_prefill)(model, prompt, plan[1])
    with taken_slots(engine, 2) as (_, slot):
        assert relative_error(engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE
        assert_same_cache(engine, slot, cache)
        for token in random_tokens(NUM_DECODE_STEPS, seed=1):
            found = engine.decode_step([slot], [token])[0]
            assert relative_error(found, decode(model, cache, [token])[-1].numpy()) < TOLERANCE
        assert_same_cache(engine, slot, cache)


@plans
@boundaries
def test_a_prompt_that_fills_max_seq_len(tiny: TinyModels, plan: Plan, boundary: Boundary) -> None:
    engine, model = tiny.engine(plan, boundary), tiny.hf_model(plan[0])
    prompt = random_tokens(MAX_SEQ_LEN)
    expected, cache = pop_prefill(model, prompt, plan[1])
    # The last slot: a write behind its end would leave the pool.
    with taken_slots(engine, NUM_SLOTS) as slots:
        assert relative_error(engine.prefill(slots[-1], prompt), expected.numpy()) < TOLERANCE
        assert_same_cache(engine, slots[-1], cache)
        with pytest.raises(UsageError, match=f"sequence of {MAX_SEQ_LEN + 1} tokens"):
            engine.decode_step([slots[-1]], [0])
        assert_same_cache(engine, slots[-1], cache)


@boundaries
@pytest.mark.parametrize("num_tail_layers", [0, 1])
def test_a_tail_of_at_most_one_layer_is_the_full_model(
    tiny: TinyModels, boundary: Boundary, num_tail_layers: int
) -> None:
    engine, prompt = tiny.engine((SMALL, num_tail_layers), boundary), random_tokens(29)
    with torch.no_grad():
        result = tiny.hf_model()(torch.tensor([prompt]), use_cache=True, cache=DynamicCache())
    layers = result.past_key_values.layers
    with taken_slots(engine, 1) as (slot,):
        assert relative_error(engine.prefill(slot, prompt), result.logits[0, -1].numpy()) < TOLERANCE
        assert_same_cache(
            engine, slot, ReferenceCache([layer.keys for layer in layers], [layer.values for layer in layers])
        )


@pytest.mark.parametrize("plan", [(SMALL, SMALL - 1), (DEEP, 10)])
@boundaries
def test_the_comparison_sees_a_tail_of_another_length(tiny: TinyModels, plan: Plan, boundary: Boundary) -> None:
    engine, prompt = tiny.engine(plan, boundary), random_tokens(29)
    other, other_cache = pop_prefill(tiny.hf_model(plan[0]), prompt, plan[1] - 1)
    with taken_slots(engine, 1) as (slot,):
        assert relative_error(engine.prefill(slot, prompt), other.numpy()) > 100 * TOLERANCE
        assert relative_error(cached(engine, slot), stacked(other_cache)) > 100 * TOLERANCE


@plans
def test_both_boundaries_give_the_same(tiny: TinyModels, plan: Plan) -> None:
    prompt, found = random_tokens(17), []
    for boundary in BOUNDARIES:
        engine = tiny.engine(plan, boundary)
        with taken_slots(engine, 1) as (slot,):
            found.append((engine.prefill(slot, prompt), cached(engine, slot)))
    for one_pass, two_step in zip(*found, strict=True):
        assert relative_error(one_pass, two_step) < TOLERANCE
    assert not np.array_equal(found[0][0], np.zeros_like(found[0][0]))
