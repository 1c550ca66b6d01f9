"""Likelihoods of answers, and the harness's requests, against Hugging Face and the reference of the method in fp32."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from engine_kit import MAX_SEQ_LEN, NUM_SLOTS, SMALL, TinyModels, random_tokens
from pop_engine.configs.errors import UsageError
from pop_engine.runtime import SamplingParams
from pop_engine.tools.evaluation.likelihood import divergence, log_softmax, walk_answers
from pop_engine.tools.evaluation.message import Case
from pop_engine.tools.evaluation.requests import (
    DEFAULT_MAX_TOKENS,
    generate_texts,
    rolling_windows,
    sampling_params,
    text_likelihood,
    token_likelihoods,
)
from pop_reference import decode, pop_prefill

FULL, POP = (SMALL, 0), (SMALL, SMALL - 1)
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("one_torch_thread")

# More cases than slots, and answers of every length down to one token.
PAIRS = [(random_tokens(3 + 5 * index, seed=index), random_tokens(1 + index, seed=50 + index)) for index in range(6)]


@torch.no_grad()
def hf_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """log p of the token after each position, [len(tokens), vocab]."""
    logprobs: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return logprobs


def hf_likelihood(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    rows = hf_logprobs(model, context + continuation)[len(context) - 1 : -1]
    chosen = rows[torch.arange(len(continuation)), torch.tensor(continuation)]
    return float(chosen.sum()), rows.argmax(-1).tolist() == continuation


def test_the_full_engine_scores_as_hugging_face_does(tiny: TinyModels) -> None:
    found = token_likelihoods(tiny.engine(FULL, "one-pass"), PAIRS)
    expected = [hf_likelihood(tiny.hf_model(), *pair) for pair in PAIRS]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=TOLERANCE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_pop_prefills_the_context_and_decodes_the_continuation(tiny: TinyModels) -> None:
    found = token_likelihoods(tiny.engine(POP, "one-pass"), PAIRS)
    model = tiny.hf_model()
    for (context, continuation), (score, _) in zip(PAIRS, found, strict=True):
        first, cache = pop_prefill(model, context, POP[1])
        rows = torch.stack([first, *(decode(model, cache, [token])[-1] for token in continuation[:-1])]).log_softmax(-1)
        assert score == pytest.approx(float(rows[range(len(continuation)), continuation].sum()), abs=TOLERANCE)


def test_what_greedy_decoding_gives_is_greedy(tiny: TinyModels) -> None:
    engine, prompt = tiny.engine(POP, "one-pass"), random_tokens(9)
    answer = list(engine.generate(prompt, SamplingParams(max_tokens=6, ignore_eos=True)).token_ids)
    other = [*answer[:-1], (answer[-1] + 1) % 300]
    assert [greedy for _, greedy in token_likelihoods(engine, [(prompt, answer), (prompt, other)])] == [True, False]


def test_a_context_that_does_not_fit_loses_its_beginning(tiny: TinyModels) -> None:
    engine, context, continuation = tiny.engine(FULL, "one-pass"), random_tokens(MAX_SEQ_LEN + 7), random_tokens(5)
    ((score, _),) = token_likelihoods(engine, [(context, continuation)])
    kept = context[-(MAX_SEQ_LEN - 4) :]
    assert score == pytest.approx(hf_likelihood(tiny.hf_model(), kept, continuation)[0], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (([1], [2] * (MAX_SEQ_LEN + 1)), f"continuation of {MAX_SEQ_LEN + 1} tokens: the engine holds max_seq_len"),
        (([], [1]), "request of 0 context tokens and 1 to score"),
        (([1], []), "request of 1 context tokens and 0 to score"),
    ],
)
def test_requests_that_cannot_be_scored(tiny: TinyModels, pair: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        token_likelihoods(tiny.engine(FULL, "one-pass"), [pair])


def test_slots_are_given_back_when_a_walk_is_left(tiny: TinyModels) -> None:
    engine = tiny.engine(FULL, "one-pass")
    walk = walk_answers(engine, [Case((1, 2), (3, 4))] * 2)
    next(walk)
    assert engine.num_free_slots == NUM_SLOTS - 1
    walk.close()  # type: ignore[attr-defined]
    assert engine.num_free_slots == NUM_SLOTS


@pytest.mark.parametrize("length", [1, 10, 11, 20, 37])
def test_windows_predict_every_token_once(length: int) -> None:
    tokens = list(range(length))
    windows = list(rolling_windows(tokens, -1, 10))
    assert [token for _, predicted in windows for token in predicted] == tokens
    for context, predicted in windows:
        assert len(context) + len(predicted) <= 11
        joined = [*context, *predicted]
        assert all(after - before == 1 for before, after in pairwise(joined))
    # The last window has as much context as fits.
    if length > 10:
        assert sum(map(len, windows[-1])) == 11


def test_a_text_longer_than_a_slot(tiny: TinyModels) -> None:
    tokens, prefix, model = random_tokens(MAX_SEQ_LEN * 2 + 9), 2, tiny.hf_model()
    first = hf_likelihood(model, [prefix], tokens[:MAX_SEQ_LEN])[0]
    second = hf_likelihood(model, tokens[MAX_SEQ_LEN - 1 : MAX_SEQ_LEN], tokens[MAX_SEQ_LEN : 2 * MAX_SEQ_LEN])[0]
    third = hf_likelihood(model, tokens[-MAX_SEQ_LEN - 1 : -9], tokens[-9:])[0]
    found = text_likelihood(tiny.engine(FULL, "one-pass"), tokens, prefix)
    assert found == pytest.approx(first + second + third, abs=3 * TOLERANCE)


def test_texts_are_generated_up_to_their_stops(tiny: TinyModels) -> None:
    engine = tiny.engine(POP, "one-pass")
    prompts = [random_tokens(4 + index, seed=index) for index in range(NUM_SLOTS + 2)]
    whole = generate_texts(engine, prompts, [SamplingParams(max_tokens=12, ignore_eos=True)] * len(prompts))
    assert whole == [engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True)).text for prompt in prompts]
    stop = whole[0][2:4]
    (stopped,) = generate_texts(engine, prompts[:1], [SamplingParams(max_tokens=12, stop=(stop,), ignore_eos=True)])
    assert stopped == whole[0][: whole[0].index(stop)]


def test_a_prompt_without_room_for_its_answer_loses_its_beginning(tiny: TinyModels) -> None:
    engine, prompt, params = tiny.engine(POP, "one-pass"), random_tokens(60), SamplingParams(max_tokens=8)
    assert generate_texts(engine, [prompt], [params]) == [engine.generate(prompt[-(MAX_SEQ_LEN - 8) :], params).text]
    with pytest.raises(UsageError, match=f"max_gen_toks {MAX_SEQ_LEN}"):
        generate_texts(engine, [prompt], [SamplingParams(max_tokens=MAX_SEQ_LEN)])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)),
        ({"until": "\n", "max_gen_toks": 5, "do_sample": False}, SamplingParams(max_tokens=5, stop=("\n",))),
        ({"until": ["a", "", "b"], "max_new_tokens": 3}, SamplingParams(max_tokens=3, stop=("a", "b"))),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)),
        ({"do_sample": True, "top_p": 0.5}, SamplingParams(max_tokens=256, temperature=1.0, top_p=0.5)),
        ({"temperature": 0.7, "seed": None}, SamplingParams(max_tokens=256, temperature=0.7)),
    ],
)
def test_settings_of_the_harness(settings: dict[str, object], expected: SamplingParams) -> None:
    assert sampling_params(settings) == expected


def test_a_setting_that_the_engine_does_not_have() -> None:
    with pytest.raises(UsageError, match="gen_kwargs num_beams: this engine has no such setting; it has until, "):
        sampling_params({"num_beams": 4})


def test_divergence_is_that_of_torch() -> None:
    generator = np.random.default_rng(0)
    one, other = (generator.normal(0, 4, 500).astype(np.float32) for _ in range(2))
    expected = torch.nn.functional.kl_div(
        torch.tensor(other).double().log_softmax(-1),
        torch.tensor(one).double().log_softmax(-1),
        log_target=True,
        reduction="sum",
    )
    assert divergence(log_softmax(one), log_softmax(other)) == pytest.approx(float(expected), rel=1e-9)
    assert divergence(log_softmax(one), log_softmax(one)) == 0
