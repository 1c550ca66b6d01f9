"""What a calibrated tail was fitted on, and what held-out text says of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

CALIBRATION_NAME = "calibration.json"


@dataclass(frozen=True)
class Estimate:
    """A mean over documents and its standard error."""

    value: float
    standard_error: float

    @classmethod
    def of_ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Estimate | None":
        """Σ numerators / Σ denominators with a ratio estimator's standard error (Cochran, Sampling Techniques, 6.3).

        None where the denominators do not add up to more than 0.
        """
        if sum(denominators) <= 0:
            return None
        count, ratio = len(numerators), sum(numerators) / sum(denominators)
        residuals = sum((n - ratio * d) ** 2 for n, d in zip(numerators, denominators, strict=True))
        return cls(ratio, sqrt(residuals / max(count - 1, 1) / count) / fmean(denominators))

    @classmethod
    def of_benefit(cls, none: Sequence[float], pruned: Sequence[float], full: Sequence[float]) -> "Estimate | None":
        """Σ(none − pruned) / Σ(none − full) over documents; None where the context is worth nothing."""
        kept = [a - b for a, b in zip(none, pruned, strict=True)]
        return cls.of_ratio(kept, [a - b for a, b in zip(none, full, strict=True)])

    def __str__(self) -> str:
        return f"{self.value:.1%} ± {self.standard_error:.1%}"


@dataclass(frozen=True)
class ProjectionError:
    """Squared error of a projection on held-out text, as a share of what it varies by: 1 is no better than a mean."""

    plain: float
    calibrated: float


@dataclass(frozen=True)
class LayerGain:
    """What calibration does to one tail layer's K and V, before k_norm and RoPE."""

    layer_idx: int
    key: ProjectionError
    value: ProjectionError


@dataclass(frozen=True)
class CalibrationRecord:
    """How the tail's K and V projections were fitted, and their held-out check.

    `data` names the text and `sha256` is its hash. NLL is in nats a token of the held-out continuations. The two
    benefits are the shares that are kept of what the context is worth to the full model; None where it was worth
    nothing.
    """

    data: str
    sha256: str
    num_tokens: int
    context_len: int
    ridge: float
    num_held_out: int
    layers: tuple[LayerGain, ...]
    nll_plain: float
    nll_calibrated: float
    benefit_plain: Estimate | None
    benefit_calibrated: Estimate | None
