"""Whether a model shows the paper's order: each ablation worse than the one before it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.ablations.catalogue import AblationName
from pop_engine.tools.ablations.result import AblationResult, AblationRow
from pop_engine.tools.evaluation.scores import mean_of

# PAPER.md, Ablations; for stage-agnostic removal stands ShortGPT, the better known.
PAPER_ORDER: tuple[AblationName, ...] = ("calibrated", "pop", "no-boundary", "no-tail-kv", "shortgpt", "first")


@dataclass(frozen=True)
class Step:
    """Two neighbours of the paper's order. `loss` is the worse one's NLL less the better one's, document by document.

    It is above 0 where the model agrees with the paper.
    """

    better: AblationRow
    worse: AblationRow
    loss: Estimate

    @property
    def is_kept(self) -> bool:
        """Whether the order is the paper's."""
        return self.loss.value > 0

    def __str__(self) -> str:
        relation = "as in the paper" if self.is_kept else "unlike in the paper"
        return (
            f"{self.worse.title} loses {self.loss.value:+.3f} ± {self.loss.standard_error:.3f} nats a token against "
            f"{self.better.title}, {relation}"
        )


def order_steps(result: AblationResult) -> list[Step]:
    """The steps between those of the order that were measured, from the best to the worst."""
    by_name = {row.name: row for row in result.rows if row.scores is not None}
    measured = [by_name[name] for name in PAPER_ORDER if name in by_name]
    return [Step(better, worse, _loss(_nlls(better), _nlls(worse))) for better, worse in pairwise(measured)]


def _loss(better: Sequence[float], worse: Sequence[float]) -> Estimate:
    return mean_of([b - a for a, b in zip(better, worse, strict=True)])


def _nlls(row: AblationRow) -> tuple[float, ...]:
    assert row.scores is not None
    return row.scores.nlls
