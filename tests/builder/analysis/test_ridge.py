"""Ridge regression against what it must give: exact maps, the textbook's formula, the same from a stream."""

import pytest
import torch

from pop_engine.builder.analysis.ridge import RidgeFit

NUM_INPUTS, SIZES = 7, (3, 5)


def samples(count: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Inputs of very different scales and far from zero, and outputs that are affine in them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, NUM_INPUTS, generator=generator, dtype=torch.float64)
    inputs = inputs * torch.logspace(-2, 2, NUM_INPUTS) + 3
    maps = torch.Generator().manual_seed(99)
    outputs = []
    for size in SIZES:
        weight = torch.randn(size, NUM_INPUTS, generator=maps, dtype=torch.float64)
        outputs.append(inputs @ weight.T + torch.randn(size, generator=maps, dtype=torch.float64))
    return inputs, outputs


def fitted(inputs: torch.Tensor, outputs: list[torch.Tensor], ridge: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    fit = RidgeFit(inputs.shape[1], [output.shape[1] for output in outputs])
    fit.add(inputs, outputs)
    return fit.solve(ridge)


def test_an_affine_map_is_recovered_exactly() -> None:
    inputs, outputs = samples(200)
    for (weight, bias), output in zip(fitted(inputs, outputs, 1e-12), outputs, strict=True):
        torch.testing.assert_close(inputs @ weight.T + bias, output, rtol=1e-6, atol=1e-6)
    fresh, expected = samples(50, seed=1)
    for (weight, bias), output in zip(fitted(inputs, outputs, 1e-12), expected, strict=True):
        torch.testing.assert_close(fresh @ weight.T + bias, output, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_the_penalty_is_on_standardised_inputs(ridge: float) -> None:
    inputs, outputs = samples(60)
    mean, spread = inputs.mean(0), inputs.std(0, correction=0)
    standard = (inputs - mean) / spread
    for (weight, bias), output in zip(fitted(inputs, outputs, ridge), outputs, strict=True):
        gram = standard.T @ standard + ridge * len(inputs) * torch.eye(NUM_INPUTS, dtype=torch.float64)
        expected = torch.linalg.solve(gram, standard.T @ (output - output.mean(0))).T / spread
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(bias, output.mean(0) - expected @ mean, rtol=1e-6, atol=1e-6)


def test_a_stream_gives_the_same_as_one_batch() -> None:
    inputs, outputs = samples(90)
    stream = RidgeFit(NUM_INPUTS, SIZES)
    for rows in (slice(0, 1), slice(1, 50), slice(50, 90)):
        stream.add(inputs[rows].float(), [output[rows].float() for output in outputs])
    assert stream.num_samples == 90
    for found, expected in zip(stream.solve(1e-3), fitted(inputs, outputs, 1e-3), strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)


def test_inputs_that_do_not_vary_or_are_copies_do_no_harm() -> None:
    inputs, outputs = samples(200)
    more = torch.cat([inputs, inputs[:, :1], torch.full((200, 1), 5.0)], dim=1)
    for (weight, bias), output in zip(fitted(more, outputs, 1e-9), outputs, strict=True):
        assert weight.isfinite().all()
        torch.testing.assert_close(more @ weight.T + bias, output, rtol=1e-4, atol=1e-4)


def test_weighted_and_summed_samples_are_least_squares_with_their_own_intercepts() -> None:
    inputs, outputs = samples(300)
    noise = torch.Generator().manual_seed(3)
    outputs = [output + torch.randn(output.shape, generator=noise, dtype=torch.float64) for output in outputs]
    sums = torch.rand(80, 300, generator=noise, dtype=torch.float64)
    sums[:, 150:] = 0
    fit = RidgeFit(NUM_INPUTS, SIZES)
    fit.add(sums @ inputs, [sums @ output for output in outputs], sums.sum(1))
    columns = torch.cat([sums @ inputs, sums.sum(1, keepdim=True)], dim=1)
    for (weight, bias), output in zip(fit.solve(1e-14), outputs, strict=True):
        expected = torch.linalg.lstsq(columns, sums @ output, driver="gelsd").solution
        torch.testing.assert_close(torch.cat([weight.T, bias[None]]), expected, rtol=1e-5, atol=1e-5)
