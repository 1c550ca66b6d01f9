"""How much each layer matters at prefill and at decode: squared gradients of its gates (PAPER.md, Virtual gates)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite, sqrt

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from pop_engine.builder.analysis.gates import gated
from pop_engine.configs.calibration import Estimate
from pop_engine.configs.errors import EngineError


@dataclass(frozen=True)
class Sample:
    """A prompt of N tokens and the output that the model itself was sampled for it: x_1 … x_N, then x_N+1 … x_T."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True)
class GateGradients:
    """∂L/∂g_l at g = 1 of one sample, for each layer, in nats; L is summed over the output's tokens."""

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    num_output_tokens: int

    def __post_init__(self) -> None:
        if not all(map(isfinite, (*self.prefill, *self.decode))):
            raise EngineError("analysis: a gate's gradient is not finite; the model overflows, try --dtype fp32")


def gate_gradients(model: PreTrainedModel, sample: Sample, num_layers: int) -> GateGradients:
    """One forward and one backward pass, for parameters that require no gradients: those would cost memory.

    Prefill gates act on positions 1 … N − 1, decode gates on N … T − 1; x_T is only a target.
    """
    gates = torch.ones(num_layers, 2, requires_grad=True)
    tokens = torch.tensor([[*sample.prompt, *sample.output[:-1]]])
    targets = torch.tensor(sample.output)
    with gated(model, gates, len(sample.prompt) - 1):
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=len(targets)).logits[0]
    loss = functional.cross_entropy(logits.float(), targets, reduction="sum")
    (gradients,) = torch.autograd.grad(loss, gates)
    prefill, decode = gradients.T.tolist()
    return GateGradients(tuple(prefill), tuple(decode), len(targets))


def importance(gradients: Sequence[Sequence[float]]) -> tuple[Estimate, ...]:
    """Ĩ_l = E[(∂L/∂g_l)²] over samples, from one row of gradients a sample."""
    return tuple(mean_estimate([value * value for value in layer]) for layer in zip(*gradients, strict=True))


def tail_losses(samples: Sequence[GateGradients]) -> tuple[Estimate, ...]:
    """What prefill without the last 0, 1, … L − 1 layers is predicted to cost, in nats an output token.

    The same expansion with every tail gate at 0 at once: ½ E[(Σ ∂L/∂g_l)²], layers' interactions included.
    """
    num_layers = len(samples[0].prefill)
    per_token = 2 * mean_output_tokens(samples)
    return tuple(
        mean_estimate([fsum(sample.prefill[num_layers - length :]) ** 2 / per_token for sample in samples])
        for length in range(num_layers)
    )


def mean_output_tokens(samples: Sequence[GateGradients]) -> float:
    """Of one sample."""
    return sum(sample.num_output_tokens for sample in samples) / len(samples)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """A mean and its standard error, of two values or more."""
    count = len(values)
    mean = fsum(values) / count
    return Estimate(mean, sqrt(fsum((value - mean) ** 2 for value in values) / (count - 1) / count))
