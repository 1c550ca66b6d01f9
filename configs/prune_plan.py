"""Which layers prefill skips."""

from dataclasses import dataclass

from pop_engine.configs.errors import UsageError


@dataclass(frozen=True)
class PrunePlan:
    """The first `num_trunk_layers` layers run in full at prefill, the last `num_tail_layers` only write K and V.

    Raises UsageError where the trunk would be empty: the tail needs one trunk layer to read from.
    """

    num_hidden_layers: int
    num_tail_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_tail_layers < self.num_hidden_layers:
            raise UsageError(
                f"--tail-layers {self.num_tail_layers}: expected 0 to {self.num_hidden_layers - 1} "
                f"for a model of {self.num_hidden_layers} layers; at least one layer must stay in the trunk"
            )

    @classmethod
    def last_third(cls, num_hidden_layers: int) -> "PrunePlan":
        """The paper's plan: floor(L / 3) tail layers (PAPER.md, Method)."""
        return cls(num_hidden_layers, num_hidden_layers // 3)

    @classmethod
    def from_ratio(cls, num_hidden_layers: int, prune_ratio: float) -> "PrunePlan":
        """Prune this share of the layers, rounded down.

        Raises UsageError where the ratio is outside [0, 1).
        """
        if not 0 <= prune_ratio < 1:
            raise UsageError(f"--prune-ratio {prune_ratio}: expected a number from 0 up to, but not including, 1")
        # The tolerance keeps 10/30 at 10 layers where the product falls just short of a whole number.
        return cls(num_hidden_layers, int(num_hidden_layers * prune_ratio + 1e-6))

    @property
    def num_trunk_layers(self) -> int:
        """How many layers prefill runs in full."""
        return self.num_hidden_layers - self.num_tail_layers

    @property
    def tail(self) -> range:
        """Indices of the tail layers."""
        return range(self.num_trunk_layers, self.num_hidden_layers)
