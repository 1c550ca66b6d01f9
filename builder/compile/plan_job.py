"""What a target needs to compile one lowered graph."""

from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.io_contract import GraphContract, Phase
from pop_engine.configs.manifest import Limits


@dataclass(frozen=True)
class PlanJob:
    """One graph's plan, to be written to `out`. `gpu` is the GPU asked for, or none for the one that is here."""

    phase: Phase
    contract: GraphContract
    limits: Limits
    gpu: str | None
    out: Path
