"""The sampler against Hugging Face's logits processors, and against plain arithmetic."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.runtime.sampling import SampledToken, Sampler, SamplingParams, filter_tokens

VOCAB_SIZE = 600


def random_logits(seed: int, vocab_size: int = VOCAB_SIZE) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(vocab_size) * rng.uniform(0.5, 6)).astype(np.float32)


def hf_probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    input_ids: Any = torch.zeros((1, 1), dtype=torch.long)
    # Doubles, so that the oracle's own rounding decides nothing.
    scores: Any = warpers(input_ids, torch.from_numpy(logits)[None].double())
    return np.asarray(scores.softmax(dim=-1)[0].numpy(), dtype=np.float64)


def our_probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    token_ids, weights = filter_tokens(logits, params)
    probabilities = np.zeros(logits.size)
    probabilities[token_ids] = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return probabilities


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=1),
        SamplingParams(temperature=0.8, top_k=40),
        SamplingParams(temperature=0.8, top_k=10_000),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, top_p=0.35),
        SamplingParams(temperature=1.0, top_p=0.999),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.8, min_p=0.1),
    ],
    ids=lambda params: f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}",
)
def test_filters_leave_what_hugging_face_leaves(params: SamplingParams) -> None:
    for seed in range(40):
        logits = random_logits(seed)
        expected = hf_probabilities(logits, params)
        found = our_probabilities(logits, params)
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


def test_top_k_keeps_ties_as_hugging_face_does() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_k=2)
    assert filter_tokens(logits, params)[0].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(our_probabilities(logits, params), hf_probabilities(logits, params), rtol=1e-6)


def test_top_p_is_the_smallest_set_that_reaches_it() -> None:
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25], dtype=np.float32))
    kept = {
        top_p: filter_tokens(logits, SamplingParams(temperature=1, top_p=top_p))[0].tolist()
        for top_p in (0.49, 0.51, 0.74, 0.76, 0.95)
    }
    assert kept == {0.49: [1], 0.51: [1, 3], 0.74: [1, 3], 0.76: [1, 2, 3], 0.95: [0, 1, 2, 3]}


def test_top_p_of_a_flat_distribution_keeps_that_share() -> None:
    token_ids, _ = filter_tokens(np.zeros(1000, dtype=np.float32), SamplingParams(temperature=1, top_p=0.2501))
    assert len(token_ids) == 251


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_over_prompt_and_generated(penalty: float) -> None:
    for seed in range(10):
        prompt = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 30).tolist()
        sampler = Sampler(SamplingParams(repetition_penalty=penalty, logprobs=VOCAB_SIZE), prompt)
        history = list(prompt)
        for step in range(8):
            logits = random_logits(100 * seed + step)
            original = logits.copy()
            found = sampler.sample(logits)
            processor = RepetitionPenaltyLogitsProcessor(penalty)
            scores = processor(torch.tensor([history]), torch.from_numpy(original)[None].clone())[0]
            assert found.token_id == int(scores.argmax())
            expected = scores.double().log_softmax(dim=-1).numpy()
            by_id = dict(found.top_logprobs)
            np.testing.assert_allclose([by_id[i] for i in range(VOCAB_SIZE)], expected, atol=2e-5)
            np.testing.assert_array_equal(logits, original)
            history.append(found.token_id)


def test_penalty_breaks_a_loop_that_greedy_is_in() -> None:
    logits = np.array([4.0, 3.9, 0.0], dtype=np.float32)
    plain, penalised = Sampler(SamplingParams(), []), Sampler(SamplingParams(repetition_penalty=1.5), [])
    assert [plain.sample(logits).token_id for _ in range(2)] == [0, 0]
    assert [penalised.sample(logits).token_id for _ in range(2)] == [0, 1]


def test_greedy_takes_the_first_of_the_highest_without_logprobs() -> None:
    assert Sampler(SamplingParams(), [1]).sample(np.array([0, 7, 7], dtype=np.float32)) == SampledToken(1, None, ())


def test_tiny_temperature_is_greedy() -> None:
    logits = np.array([1.0, 1.0001, 0.0], dtype=np.float32)
    for temperature in (1e-300, 1e-45, 1e-9):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1), [])
        assert {sampler.sample(logits).token_id for _ in range(20)} == {1}


def test_draws_follow_the_filtered_distribution() -> None:
    logits = random_logits(3, vocab_size=12)
    params = SamplingParams(temperature=1.5, top_k=8, top_p=0.97, seed=11)
    expected = hf_probabilities(logits, params)
    sampler, num_draws = Sampler(params, []), 20_000
    counts = Counter(sampler.sample(logits).token_id for _ in range(num_draws))
    for token_id, probability in enumerate(expected):
        sigma = math.sqrt(num_draws * probability * (1 - probability))
        assert abs(counts[token_id] - num_draws * probability) <= 4.5 * sigma
    assert sum(probability == 0 for probability in expected) >= 4


def test_seed_reproduces_and_no_seed_does_not() -> None:
    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
        return [sampler.sample(np.zeros(500, dtype=np.float32)).token_id for _ in range(20)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_logprobs_ignore_temperature_and_filters(temperature: float) -> None:
    logits = random_logits(8)
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.9, seed=0, logprobs=4)
    found = Sampler(params, []).sample(logits)
    expected = torch.from_numpy(logits).double().log_softmax(dim=-1)
    top = expected.topk(4)
    assert [token_id for token_id, _ in found.top_logprobs] == top.indices.tolist()
    np.testing.assert_allclose([value for _, value in found.top_logprobs], top.values.numpy(), atol=1e-5)
    assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-5)


def test_logprobs_zero_reports_only_the_chosen_token_and_ties_go_by_id() -> None:
    flat = np.zeros(8, dtype=np.float32)
    only = Sampler(SamplingParams(logprobs=0), []).sample(flat)
    assert only.top_logprobs == ()
    assert only.logprob == pytest.approx(-math.log(8))
    assert [i for i, _ in Sampler(SamplingParams(logprobs=3), []).sample(flat).top_logprobs] == [0, 1, 2]
    assert len(Sampler(SamplingParams(logprobs=99), []).sample(flat).top_logprobs) == 8


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-5, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=100.0, top_k=3),
        SamplingParams(temperature=1.0, repetition_penalty=100.0, logprobs=2),
        SamplingParams(temperature=1.0, repetition_penalty=0.01, logprobs=2),
    ],
)
def test_extremes_neither_warn_nor_leave_the_vocabulary(params: SamplingParams) -> None:
    sampler = Sampler(params, [0, 1])
    logits = np.array([1e30, -1e30, 0, 88, -88], dtype=np.float32)
    assert all(0 <= sampler.sample(logits).token_id < 5 for _ in range(20))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=2)])
def test_logits_that_are_not_finite_are_an_engine_error(value: float, params: SamplingParams) -> None:
    logits = random_logits(0)
    logits[17] = value
    with pytest.raises(EngineError, match=r"logits: (nan|inf|-inf) for token 17.*pop-inspect"):
        Sampler(params, []).sample(logits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens 0: expected a whole number of at least 1"),
        ({"max_tokens": 2.5}, r"max_tokens 2\.5: expected a whole number"),
        ({"temperature": -0.1}, r"temperature -0\.1: expected a number from 0 to 100"),
        ({"temperature": math.nan}, r"temperature nan: expected a number"),
        ({"temperature": math.inf}, r"temperature inf: expected a number"),
        ({"temperature": "0.5"}, r"temperature '0\.5': expected a number"),
        ({"top_p": 0.0}, r"top_p 0: expected a number above 0"),
        ({"top_p": 1.01}, r"top_p 1\.01: expected a number from 0 to 1"),
        ({"top_p": math.nan}, r"top_p nan"),
        ({"top_k": -1}, r"top_k -1: expected a whole number of at least 0"),
        ({"min_p": 1.5}, r"min_p 1\.5"),
        ({"min_p": math.nan}, r"min_p nan"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty 0\.0: expected a number from 0\.01 to 100"),
        ({"repetition_penalty": math.nan}, r"repetition_penalty nan"),
        ({"seed": -3}, r"seed -3: expected a whole number of at least 0"),
        ({"logprobs": -1}, r"logprobs -1"),
        ({"stop": ("a", "")}, r"stop \('a', ''\): expected a tuple of strings, none of them empty"),
        ({"stop": "END"}, r"stop 'END': expected a tuple of strings"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], message: str) -> None:
    build: Callable[..., SamplingParams] = SamplingParams
    with pytest.raises(UsageError, match=message):
        build(**arguments)


def test_numpy_numbers_are_numbers() -> None:
    build: Callable[..., SamplingParams] = SamplingParams
    assert not build(max_tokens=np.int64(3), temperature=np.float32(0.5)).is_greedy
    assert SamplingParams().is_greedy


def test_greedy_on_a_large_vocabulary_is_fast() -> None:
    logits, sampler = random_logits(0, vocab_size=150_000), Sampler(SamplingParams(), list(range(2000)))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        sampler.sample(logits)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3
