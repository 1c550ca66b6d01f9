"""The estimator against autograd by hand, brute-force removal, NumPy's statistics, and POP itself."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gate_kit import VOCAB_SIZE, gates_without, hand_gated_logits, loss_increase, scaled_model
from pop_engine.builder.analysis.importance import (
    GateGradients,
    Sample,
    gate_gradients,
    importance,
    mean_estimate,
    tail_losses,
)
from pop_engine.builder.analysis.self_text import sample_continuations
from pop_engine.configs.errors import EngineError
from pop_reference import decode, pruned_prefill

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPT_LEN, OUTPUT_LEN = 16, 6
# How much each layer adds: neither rising nor falling with depth. The last layer's prefill gate never matters.
SCALES = [0.12, 0.03, 0.2, 0.06, 0.4, 0.1, 0.015, 0.15]
NUM_SAMPLES = 64
# A model, its samples and their gradients.
Analyzed = tuple[Any, list[Sample], list[GateGradients]]


def random_prompts(count: int) -> torch.Tensor:
    return torch.randint(2, VOCAB_SIZE, (count, PROMPT_LEN), generator=torch.Generator().manual_seed(3))


def draw_samples(model: Any, count: int) -> list[Sample]:
    prompts = random_prompts(count)
    outputs = sample_continuations(model, prompts, OUTPUT_LEN, torch.Generator().manual_seed(4))
    return [Sample(tuple(p), tuple(o)) for p, o in zip(prompts.tolist(), outputs, strict=True)]


def test_gradients_are_those_of_gates_written_by_hand() -> None:
    model = scaled_model([0.8, 1.2])
    sample = draw_samples(model, 1)[0]
    gates = [(torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)) for _ in range(2)]
    tokens = torch.tensor([[*sample.prompt, *sample.output]])
    log_probabilities = hand_gated_logits(model, tokens[:, :-1], gates, PROMPT_LEN)[0].log_softmax(-1)
    scored = [log_probabilities[t - 1, tokens[0, t]] for t in range(PROMPT_LEN, PROMPT_LEN + OUTPUT_LEN)]
    expected = torch.autograd.grad(
        -torch.stack(scored).sum(), [gate for pair in gates for gate in pair], materialize_grads=True
    )
    found = gate_gradients(model, sample, 2)
    np.testing.assert_allclose(found.prefill, [float(gradient) for gradient in expected[0::2]], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found.decode, [float(gradient) for gradient in expected[1::2]], rtol=1e-5, atol=1e-7)
    assert found.prefill[0] != 0
    assert found.prefill[1] == 0
    assert found.num_output_tokens == OUTPUT_LEN


def test_a_prompt_of_two_tokens_and_an_output_of_one() -> None:
    found = gate_gradients(scaled_model([1.0, 1.0, 1.0]), Sample((5, 7), (9,)), 3)
    assert found.prefill[0] != 0
    assert all(found.decode)


@functools.cache
def analyzed() -> Analyzed:
    model = scaled_model(SCALES)
    samples = draw_samples(model, NUM_SAMPLES)
    return model, samples, [gate_gradients(model, sample, len(SCALES)) for sample in samples]


def ranks(values: list[float]) -> NDArray[np.int64]:
    return np.argsort(np.argsort(values))


@pytest.mark.parametrize(("phase", "name"), [(0, "prefill"), (1, "decode")])
def test_ranks_are_those_of_removal_by_brute_force(phase: int, name: str) -> None:
    model, samples, gradients = analyzed()
    tokens = torch.tensor([[*sample.prompt, *sample.output[:-1]] for sample in samples[::4]])
    with torch.no_grad():
        truth = [loss_increase(model, tokens, [layer], phase, PROMPT_LEN) for layer in range(len(SCALES))]
    found = [estimate.value for estimate in importance([getattr(sample, name) for sample in gradients])]
    spearman = float(np.corrcoef(ranks(truth), ranks(found))[0, 1])
    assert spearman > 0.9, (truth, found)


def test_a_pruned_tail_costs_what_is_predicted() -> None:
    """Against the golden POP: its outputs' divergence from the full model's, on the model's own outputs."""
    model, samples, gradients = analyzed()
    predicted = tail_losses(gradients)
    costs: dict[int, list[float]] = {2: [], 3: []}
    for sample in samples[::4]:
        rows = [sample.prompt[-1], *sample.output[:-1]]
        full, *pruned = (
            decode(model, pruned_prefill(model, list(sample.prompt[:-1]), tail), rows).log_softmax(-1)
            for tail in (0, *costs)
        )
        for tail, found in zip(costs, pruned, strict=True):
            costs[tail].append(float((full.exp() * (full - found)).sum(-1).mean()))
    for tail, measured in costs.items():
        assert predicted[tail].value == pytest.approx(np.mean(measured), rel=0.4)
    assert predicted[0].value == 0
    assert predicted[1].value == 0


def test_means_and_standard_errors() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(30, 4))
    found = importance(rows.tolist())
    np.testing.assert_allclose([estimate.value for estimate in found], (rows**2).mean(0), rtol=1e-12)
    errors = (rows**2).std(0, ddof=1) / np.sqrt(30)
    np.testing.assert_allclose([estimate.standard_error for estimate in found], errors, rtol=1e-12)
    counts = random.integers(1, 9, size=30)
    samples = [GateGradients(tuple(row), tuple(row), int(count)) for row, count in zip(rows, counts, strict=True)]
    losses = tail_losses(samples)
    expected = [(rows[:, 4 - length :].sum(1) ** 2).mean() / 2 / counts.mean() for length in range(4)]
    np.testing.assert_allclose([loss.value for loss in losses], expected, rtol=1e-12)
    assert mean_estimate([2.0, 4.0]).standard_error == 1.0


def test_gates_without_effect_leave_the_loss() -> None:
    """The brute force itself: nothing removed costs nothing, and a last layer's prefill rows are read by nobody."""
    model = scaled_model([1.0, 1.0])
    tokens = random_prompts(2)
    with torch.no_grad():
        assert loss_increase(model, tokens, [], 0, 8) == pytest.approx(0, abs=1e-12)
        assert loss_increase(model, tokens, [1], 0, 8) == pytest.approx(0, abs=1e-12)
        assert loss_increase(model, tokens, [1], 1, 8) > 1e-3
    assert gates_without(2, [1], 1)[1][1] == 0


def test_an_overflow_is_no_importance() -> None:
    with pytest.raises(EngineError, match="gradient is not finite"):
        GateGradients((0.0, float("inf")), (0.0, 0.0), 3)
