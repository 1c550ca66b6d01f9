"""A prompt fed in chunks, and a conversation continued in its slot, against one chunk and against the reference."""

import pytest

from engine_kit import (
    BOUNDARIES,
    DEEP,
    MAX_SEQ_LEN,
    SMALL,
    Plan,
    TinyModels,
    cached,
    chunks_of,
    random_tokens,
    relative_error,
    stacked,
    taken_slots,
)
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import Boundary
from pop_reference import ReferenceCache, decode, pop_prefill, pruned_prefill

TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("one_torch_thread")
plans = pytest.mark.parametrize("plan", [(SMALL, 0), (DEEP, 10)], ids=["full", "pruned"])
boundaries = pytest.mark.parametrize("boundary", BOUNDARIES)


@plans
@boundaries
# Around the chunk's size, where a chunk of context alone, or none at all, comes before the last token.
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 6, 10, 11, 23, MAX_SEQ_LEN])
def test_chunks_equal_one_chunk(tiny: TinyModels, plan: Plan, boundary: Boundary, num_tokens: int) -> None:
    engine, prompt = tiny.engine(plan, boundary), random_tokens(num_tokens)
    with taken_slots(engine, 2) as (whole, chunked):
        expected = engine.prefill(whole, prompt)
        with chunks_of(engine, 5):
            found = engine.prefill(chunked, prompt)
        assert relative_error(found, expected) < TOLERANCE
        assert relative_error(cached(engine, chunked), cached(engine, whole)) < TOLERANCE


@pytest.mark.parametrize("max_prefill_len", [1, 2, 7, 22])
@boundaries
def test_any_chunk_size_equals_the_reference(tiny: TinyModels, boundary: Boundary, max_prefill_len: int) -> None:
    engine, prompt = tiny.engine((DEEP, 10), boundary), random_tokens(23)
    expected, cache = pop_prefill(tiny.hf_model(DEEP), prompt, 10)
    with taken_slots(engine, 1) as (slot,), chunks_of(engine, max_prefill_len):
        assert relative_error(engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE


@boundaries
def test_no_call_is_longer_than_the_limit(
    tiny: TinyModels, boundary: Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.engine((DEEP, 10), boundary)
    session, calls = engine._session, []
    assert session is not None
    prefill = session.prefill

    def counted(slot: int, token_ids, cache_len: int, num_boundary: int, images=None):  # type: ignore[no-untyped-def]
        calls.append((len(token_ids), cache_len, num_boundary))
        return prefill(slot, token_ids, cache_len, num_boundary, images)

    monkeypatch.setattr(session, "prefill", counted)
    with taken_slots(engine, 1) as (slot,), chunks_of(engine, 5):
        engine.prefill(slot, random_tokens(12))
    last = (2, 10, 1) if boundary == "one-pass" else (1, 10, 0)
    assert calls == [(5, 0, 0), (5, 5, 0), last]


@boundaries
@pytest.mark.parametrize("num_more", [1, 2, 13])
def test_a_continued_conversation_equals_the_reference(tiny: TinyModels, boundary: Boundary, num_more: int) -> None:
    """Prompt, three tokens of an answer, then more of the conversation: pruned again, but for its last token."""
    engine, model, num_tail_layers = tiny.engine((DEEP, 10), boundary), tiny.hf_model(DEEP), 10
    prompt, answer, more = random_tokens(11, 1), random_tokens(3, 2), random_tokens(num_more, 3)
    cache: ReferenceCache = pop_prefill(model, prompt, num_tail_layers)[1]
    with taken_slots(engine, 2) as (_, slot), chunks_of(engine, 5):
        engine.prefill(slot, prompt)
        for token in answer:
            engine.decode_step([slot], [token])
            decode(model, cache, [token])
        found = engine.prefill(slot, more)
        pruned_prefill(model, more[:-1], num_tail_layers, cache)
        assert relative_error(found, decode(model, cache, more[-1:])[-1].numpy()) < TOLERANCE
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE


def test_a_conversation_that_does_not_fit_leaves_the_slot_as_it_was(tiny: TinyModels) -> None:
    engine = tiny.engine((DEEP, 10), "one-pass")
    with taken_slots(engine, 1) as (slot,):
        engine.prefill(slot, random_tokens(40))
        before = cached(engine, slot)
        with pytest.raises(UsageError, match="sequence of 49 tokens: the engine holds max_seq_len 48"):
            engine.prefill(slot, random_tokens(9))
        assert (cached(engine, slot) == before).all()
        engine.prefill(slot, random_tokens(8))
