"""What the benchmarks' results share."""

from dataclasses import dataclass

from pop_engine.configs.manifest import Manifest
from pop_engine.tools.spread import Spread


@dataclass(frozen=True)
class DecodeRow:
    """Time of one decode step, that is, per token of each sequence, at one batch size."""

    batch_size: int
    pop: Spread
    full: Spread
    ratio: float


@dataclass(frozen=True)
class EngineFacts:
    """Which engine was measured, and the most memory its process took."""

    directory: str
    model: str
    dtype: str
    target: str
    versions: dict[str, str]
    boundary: str
    num_tail_layers: int
    peak_memory_bytes: int


def describe_engine_facts(directory: str, manifest: Manifest, peak_memory_bytes: int) -> EngineFacts:
    """The part of a manifest that belongs beside a figure."""
    return EngineFacts(
        directory=directory,
        model=manifest.source.name,
        dtype=manifest.dtype,
        target=manifest.target.name,
        versions=manifest.target.versions,
        boundary=manifest.boundary,
        num_tail_layers=manifest.plan.num_tail_layers,
        peak_memory_bytes=peak_memory_bytes,
    )
