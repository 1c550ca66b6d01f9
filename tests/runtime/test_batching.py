"""Sequences of different lengths decoded together, slots that are bridged, and how slots come back."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_kit import (
    BOUNDARIES,
    DEEP,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    TinyModels,
    cached,
    random_tokens,
    relative_error,
    taken_slots,
)
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.runtime import Engine, SamplingParams
from pop_engine.runtime.kv_cache import SlotRange

TOLERANCE = 1e-5
PROMPTS = [random_tokens(length, seed=length) for length in (3, 17, 1, 30)]
STEPS = np.array([random_tokens(5, seed=100 + slot) for slot in range(NUM_SLOTS)]).T.tolist()
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(params=BOUNDARIES)
def engine(tiny: TinyModels, request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = tiny.engine((DEEP, 10), request.param)
    yield engine
    assert engine.num_free_slots == NUM_SLOTS


def alone(engine: Engine, prompt: list[int], tokens: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of each step and the final cache of one sequence with the engine to itself."""
    with taken_slots(engine, 1) as (slot,):
        rows = [engine.prefill(slot, prompt)] + [engine.decode_step([slot], [token])[0] for token in tokens]
        return np.stack(rows), cached(engine, slot)


def test_a_batch_equals_each_sequence_alone(engine: Engine) -> None:
    expected = [alone(engine, prompt, [step[i] for step in STEPS]) for i, prompt in enumerate(PROMPTS)]
    with taken_slots(engine, NUM_SLOTS) as slots:
        rows = [np.stack([engine.prefill(slot, prompt) for slot, prompt in zip(slots, PROMPTS, strict=True)])]
        rows += [engine.decode_step(slots, step) for step in STEPS]
        for i, slot in enumerate(slots):
            assert relative_error(np.stack([row[i] for row in rows]), expected[i][0]) < TOLERANCE
            assert relative_error(cached(engine, slot), expected[i][1]) < TOLERANCE


def test_rows_come_back_in_the_order_asked_for(engine: Engine) -> None:
    with taken_slots(engine, NUM_SLOTS) as slots:
        for slot, prompt in zip(slots, PROMPTS, strict=True):
            engine.prefill(slot, prompt)
        backwards = engine.decode_step([3, 0, 2], [7, 8, 9])
    for row, prompt, token in zip(backwards, (PROMPTS[3], PROMPTS[0], PROMPTS[2]), (7, 8, 9), strict=True):
        assert relative_error(row, alone(engine, prompt, [token])[0][1]) < TOLERANCE


@pytest.mark.parametrize("between", ["busy", "free", "one token left"])
def test_a_bridged_slot_is_none_the_worse(engine: Engine, between: str) -> None:
    bridged = random_tokens(MAX_SEQ_LEN - 1) if between == "one token left" else PROMPTS[1]
    expected = [alone(engine, prompt, [7, 8]) for prompt in (PROMPTS[0], PROMPTS[2])]
    with taken_slots(engine, 3) as (first, middle, last):
        engine.prefill(first, PROMPTS[0])
        engine.prefill(middle, bridged)
        engine.prefill(last, PROMPTS[2])
        if between == "free":
            engine.free_slot(middle)
        assert engine._slots.covering([first, last]) == [SlotRange(first, 3)]
        before = cached(engine, middle)
        engine.decode_step([first, last], [7, 7])
        found = engine.decode_step([last, first], [8, 8])
        assert np.array_equal(cached(engine, middle), before)
        assert relative_error(found[1], expected[0][0][2]) < TOLERANCE
        assert relative_error(found[0], expected[1][0][2]) < TOLERANCE
        if between == "free":
            assert engine.allocate_slot() == middle
            engine.prefill(middle, bridged)
        own = engine.decode_step([middle], [9])[0]
        after = cached(engine, middle)
    rows, cache = alone(engine, bridged, [9])
    assert relative_error(own, rows[1]) < TOLERANCE
    assert relative_error(after, cache) < TOLERANCE


def test_a_full_slot_in_the_gap_is_not_touched(engine: Engine) -> None:
    with taken_slots(engine, 3) as (first, full, last):
        engine.prefill(first, PROMPTS[0])
        engine.prefill(full, random_tokens(MAX_SEQ_LEN))
        engine.prefill(last, PROMPTS[2])
        before = cached(engine, full)
        assert engine._slots.covering([first, last]) == [SlotRange(first, 1), SlotRange(last, 1)]
        found = engine.decode_step([first, last], [7, 8])
        assert np.array_equal(cached(engine, full), before)
    for row, prompt, token in zip(found, (PROMPTS[0], PROMPTS[2]), (7, 8), strict=True):
        assert relative_error(row, alone(engine, prompt, [token])[0][1]) < TOLERANCE


def test_a_batch_with_a_full_slot_is_refused_whole(engine: Engine) -> None:
    with taken_slots(engine, 2) as (short, full):
        engine.prefill(short, PROMPTS[0])
        engine.prefill(full, random_tokens(MAX_SEQ_LEN))
        with pytest.raises(UsageError, match="sequence of 49 tokens"):
            engine.decode_step([short, full], [7, 7])
        assert cached(engine, short).shape[-2] == len(PROMPTS[0])


@pytest.mark.parametrize(
    ("slots", "token_ids", "message"),
    [
        ([0], [1, 2], r"slots \[0\] and 2 tokens"),
        ([0, 0], [1, 2], "give each slot once, with one token"),
        ([3], [1], "slot 3: not allocated"),
        ([-1], [1], "slot -1: not allocated"),
        ([0], [-1], "token id -1"),
    ],
)
def test_a_bad_step_is_refused(engine: Engine, slots: list[int], token_ids: list[int], message: str) -> None:
    with taken_slots(engine, 1) as (slot,):
        engine.prefill(slot, [5])
        with pytest.raises(UsageError, match=message):
            engine.decode_step(slots, token_ids)
        assert cached(engine, slot).shape[-2] == 1


def test_run_batch_equals_generate_with_more_prompts_than_slots(engine: Engine) -> None:
    prompts = [random_tokens(1 + 3 * i, seed=i) for i in range(2 * NUM_SLOTS + 1)]
    # Different lengths, so that slots become free one at a time and are taken again beside busy ones.
    params = [SamplingParams(max_tokens=2 + i % 5, ignore_eos=True, temperature=i % 2, seed=i) for i in range(9)]
    pieces: dict[int, list[Any]] = {i: [] for i in range(len(prompts))}
    results = {}
    for event in engine.run_batch(prompts, params):
        assert event.index not in results, "an event after the result"
        pieces[event.index].append(event.piece)
        if event.result is not None:
            results[event.index] = event.result
    assert engine.num_free_slots == NUM_SLOTS
    for i, (prompt, own_params) in enumerate(zip(prompts, params, strict=True)):
        expected = engine.generate(prompt, own_params)
        assert results[i].token_ids == expected.token_ids
        assert results[i].text == expected.text == "".join(piece.text for piece in pieces[i])
        assert len(pieces[i]) == 2 + i % 5
        assert results[i].metrics.num_prompt_tokens == len(prompt)


def test_streams_taken_by_turns_do_not_mix(engine: Engine) -> None:
    streams = [engine.stream(prompt, PARAMS) for prompt in PROMPTS]
    turns = list(zip(*streams, strict=True))
    for prompt, pieces in zip(PROMPTS, zip(*turns, strict=True), strict=True):
        assert "".join(piece.text for piece in pieces) == engine.generate(prompt, PARAMS).text


def test_an_abandoned_stream_gives_its_slot_back(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], PARAMS)
    next(stream)
    assert engine.num_free_slots == NUM_SLOTS - 1
    stream.close()  # type: ignore[attr-defined]
    assert engine.num_free_slots == NUM_SLOTS
    assert list(engine.stream(PROMPTS[0], PARAMS))
    engine.stream(PROMPTS[0], PARAMS)
    assert engine.num_free_slots == NUM_SLOTS


def test_an_abandoned_batch_gives_its_slots_back(engine: Engine) -> None:
    events = engine.run_batch(PROMPTS * 2, [PARAMS] * 8)
    for _ in range(6):
        next(events)
    assert engine.num_free_slots == 0
    events.close()  # type: ignore[attr-defined]
    assert engine.num_free_slots == NUM_SLOTS


def test_slots_come_back_after_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise EngineError("no more")

    for name in ("decode", "prefill"):
        with monkeypatch.context() as patch:
            patch.setattr(engine._session, name, fail)
            with pytest.raises(EngineError, match="no more"):
                list(engine.run_batch(PROMPTS[1:], [PARAMS] * 3))
        assert engine.num_free_slots == NUM_SLOTS
    assert len(engine.generate(PROMPTS[0], PARAMS).token_ids) == 9


def test_nan_logits_are_an_error_and_free_the_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = np.full((1, engine.manifest.dims.vocab_size), np.nan, np.float32)
    monkeypatch.setattr(engine, "prefill", lambda *_: nan[0])
    with pytest.raises(EngineError, match="expected finite numbers"):
        engine.generate(PROMPTS[0], PARAMS)


def test_generate_waits_for_no_slot_that_others_hold(engine: Engine) -> None:
    with taken_slots(engine, NUM_SLOTS), pytest.raises(UsageError, match="slots: all 4 are taken"):
        engine.generate(PROMPTS[0], PARAMS)


def test_a_slot_is_taken_once_and_given_back_once(engine: Engine) -> None:
    with taken_slots(engine, NUM_SLOTS) as slots:
        assert slots == list(range(NUM_SLOTS))
        with pytest.raises(UsageError, match="slots: all 4 are taken"):
            engine.allocate_slot()
    with pytest.raises(UsageError, match="slot 0: not allocated"):
        engine.free_slot(0)


def test_a_slot_taken_again_is_empty(engine: Engine) -> None:
    expected = alone(engine, PROMPTS[0], [7])
    alone(engine, random_tokens(MAX_SEQ_LEN), [])
    found = alone(engine, PROMPTS[0], [7])
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])
