"""What a target needs to compile one lowered graph."""

from dataclasses import dataclass
from pathlib import Path

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.configs.io_contract import GraphContract, GraphName
from pop_engine.configs.manifest import Limits
from pop_engine.configs.plan_options import PlanOptions


@dataclass(frozen=True)
class PlanJob:
    """One graph's plan, to be written to `out`, in the engine directory whose weights `layout` places.

    `patches_per_token` is how many patches a vision graph makes one image token of.
    """

    phase: GraphName
    contract: GraphContract
    limits: Limits
    options: PlanOptions
    layout: WeightLayout
    out: Path
    patches_per_token: int = 1
