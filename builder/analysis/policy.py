"""How long a tail to prune, by what the virtual gates say."""

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, get_args

from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import ImportanceRecord

PolicyName = Literal["last-third", "knee", "ratio", "budget"]
POLICY_FORMS = "last-third, knee, ratio R or budget NLL"
_WITH_VALUE: tuple[PolicyName, ...] = ("ratio", "budget")


@dataclass(frozen=True)
class Policy:
    """The paper's last third, a share of the layers, the loss curve's knee, or a loss in nats an output token."""

    name: PolicyName
    value: float | None = None

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name} {self.value:g}"

    def choose(self, record: ImportanceRecord) -> PrunePlan:
        """The plan for the model that the record is of."""
        num_layers = len(record.prefill)
        losses = [loss.value for loss in record.tail_loss]
        if self.name == "knee":
            return PrunePlan(num_layers, knee(losses[: num_layers // 2 + 1]))
        if self.value is None:
            return PrunePlan.last_third(num_layers)
        if self.name == "ratio":
            return PrunePlan.from_ratio(num_layers, self.value)
        budget = self.value
        # Length 0 costs nothing and is always within.
        return PrunePlan(num_layers, len(list(takewhile(lambda loss: loss <= budget, losses))) - 1)


def parse_policy(words: list[str]) -> Policy:
    """Read what was given to --policy. Raises UsageError where it is none of the four forms."""
    given = f"--policy {' '.join(words)}"
    names: tuple[PolicyName, ...] = get_args(PolicyName)
    name = next((name for name in names if name == words[0]), None)
    if name is None or len(words) != (2 if name in _WITH_VALUE else 1):
        raise UsageError(f"{given}: expected {POLICY_FORMS}")
    if name not in _WITH_VALUE:
        return Policy(name)
    try:
        value = float(words[1])
    except ValueError:
        raise UsageError(f"{given}: expected a number after {name}") from None
    if name == "ratio" and not 0 <= value < 1:
        raise UsageError(f"{given}: expected a ratio from 0 up to, but not including, 1")
    if name == "budget" and not value >= 0:
        raise UsageError(f"{given}: expected a loss in nats an output token, 0 or more")
    return Policy(name, value)


def knee(losses: list[float]) -> int:
    """The length whose loss is farthest below the line from the first to the last (Satopää et al., Kneedle, 2011).

    Give it lengths up to half the layers: beyond it outputs fall apart (PAPER.md, Ablations), and the loss of the
    first layers would hide the rest of the curve.
    """
    last = len(losses) - 1
    if last < 1 or losses[last] <= 0:
        return last
    return max(range(last + 1), key=lambda length: length / last - losses[length] / losses[last])
