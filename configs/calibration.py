"""What a calibrated tail was fitted on, and what held-out text says of it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over documents and its standard error."""

    value: float
    standard_error: float

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
