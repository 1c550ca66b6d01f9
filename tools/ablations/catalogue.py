"""Which ablations and baselines there are, in the order of the paper's findings."""

from dataclasses import dataclass
from typing import Literal

AblationName = Literal[
    "calibrated",
    "pop",
    "wanda",
    "no-boundary",
    "interleaved",
    "no-tail-kv",
    "shortgpt-25",
    "shortgpt",
    "remove-last",
    "slicegpt",
    "first",
]
ALL = "all"


@dataclass(frozen=True)
class Ablation:
    """One row of the table. `is_pop` where only prefill is pruned, `needs_text` where something is fitted on text."""

    name: AblationName
    title: str
    is_pop: bool = True
    needs_text: bool = False


# PAPER.md, Ablations and Table 1.
ABLATIONS: tuple[Ablation, ...] = (
    Ablation("calibrated", "POP, calibrated", needs_text=True),
    Ablation("pop", "POP"),
    Ablation("wanda", "Wanda, 30 % of the weights", is_pop=False, needs_text=True),
    Ablation("no-boundary", "POP without the boundary"),
    Ablation("interleaved", "POP on interleaved layers"),
    Ablation("no-tail-kv", "POP, tail K and V left out"),
    Ablation("shortgpt-25", "ShortGPT, a quarter of the layers", is_pop=False, needs_text=True),
    Ablation("shortgpt", "ShortGPT, as many layers as POP", is_pop=False, needs_text=True),
    Ablation("remove-last", "last layers removed", is_pop=False),
    Ablation("slicegpt", "SliceGPT, 25 % of the directions", is_pop=False, needs_text=True),
    Ablation("first", "POP on the first layers"),
)
NAMES: tuple[AblationName, ...] = tuple(ablation.name for ablation in ABLATIONS)


def find_ablations(words: tuple[str, ...]) -> tuple[Ablation, ...]:
    """Those that are named, or all, in the table's order. Raises ValueError naming what is none of them."""
    for word in words:
        if word not in (*NAMES, ALL):
            raise ValueError(f"{word!r}: expected {ALL}, or of these between commas: {', '.join(NAMES)}")
    return tuple(ablation for ablation in ABLATIONS if ALL in words or ablation.name in words)
