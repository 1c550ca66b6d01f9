"""How long repeated runs took."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Spread:
    """Milliseconds of repeated runs."""

    median: float
    min: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise at least one sample. Percentiles interpolate between the two nearest."""
        # The inclusive method never leaves the range of the samples; it needs two, and of one it makes no difference.
        deciles = statistics.quantiles([*samples] * (2 if len(samples) == 1 else 1), n=10, method="inclusive")
        return cls(statistics.median(samples), min(samples), deciles[0], deciles[-1], len(samples))
