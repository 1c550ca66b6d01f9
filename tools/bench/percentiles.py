"""What many samples of one quantity say."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Percentiles:
    """Mean, median and tails of samples. The 99th percentile of few samples is little more than their largest."""

    mean: float
    median: float
    p10: float
    p90: float
    p99: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Summarise at least one sample. Percentiles interpolate between the two nearest samples, as NumPy's do."""
        # The method never leaves the range of the samples; it needs two, and of one it makes no difference.
        several = [*samples] * (2 if len(samples) == 1 else 1)
        cuts = statistics.quantiles(several, n=100, method="inclusive")
        return cls(statistics.fmean(samples), statistics.median(samples), cuts[9], cuts[89], cuts[98], len(samples))

    @classmethod
    def of_any(cls, samples: Sequence[float]) -> Self | None:
        """The same, or None where there is no sample."""
        return cls.of(samples) if samples else None
