"""What a graph of an engine directory is, as its manifest has it."""

from dataclasses import dataclass

from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.plan_record import PlanRecord


@dataclass(frozen=True)
class GraphRecord:
    """One graph: its file, its bindings, how often each operator occurs in it, and the plan compiled from it."""

    file: str
    contract: GraphContract
    operators: dict[str, int]
    plan: PlanRecord | None = None
