"""What an evaluation found, with all that a figure needs beside it. Written as JSON, tables and a report."""

from dataclasses import dataclass

from pop_engine.configs.calibration import Estimate
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.evaluation.scores import DocumentScore, PositionLoss, Scores
from pop_engine.tools.machine import Machine


@dataclass(frozen=True)
class EvalEngine:
    """Which engine it was. `calibrated_on` names the text, `built_with` is the version of pop-engine."""

    directory: str
    model: str
    revision: str | None
    dtype: str
    target: str
    versions: dict[str, str]
    num_hidden_layers: int
    num_tail_layers: int
    boundary: str
    boundary_window: int
    calibrated_on: str | None
    built_with: str
    peak_memory_bytes: int


@dataclass(frozen=True)
class EvalSetting:
    """What was run: the data and its SHA-256, and the options that change a score."""

    data: str
    data_sha256: str
    num_documents: int
    context_len: int | None
    max_tokens: int
    chat: bool
    max_loss_percent: float | None
    threads: int | None


@dataclass(frozen=True)
class EvalResult:
    """One engine against the full one. `within_max_loss` is None where no --max-loss was given."""

    machine: Machine
    setting: EvalSetting
    pop: EvalEngine
    full: EvalEngine
    scores: Scores
    within_max_loss: bool | None
    positions: tuple[PositionLoss, ...]
    documents: tuple[DocumentScore, ...]


@dataclass(frozen=True)
class SweepRow:
    """One tail length; without scores, `refused` says why it could not be built."""

    num_tail_layers: int
    calibrated: bool
    within_max_loss: bool | None
    scores: Scores | None
    positions: tuple[PositionLoss, ...]
    documents: tuple[DocumentScore, ...]
    refused: str | None = None


@dataclass(frozen=True)
class SweepResult:
    """All tail lengths against one full engine.

    `longest` is the row with the longest tail that stays within --max-loss (of two, the one that keeps more), None
    where none does or no --max-loss was given.
    """

    machine: Machine
    setting: EvalSetting
    full: EvalEngine
    calibrate: str | None
    boundary_window: int | None
    rows: tuple[SweepRow, ...]
    longest: int | None


def describe_engine(directory: str, manifest: Manifest, peak_memory_bytes: int) -> EvalEngine:
    """The part of a manifest that belongs beside a score."""
    calibration = manifest.calibration
    return EvalEngine(
        directory=directory,
        model=manifest.source.name,
        revision=manifest.source.revision,
        dtype=manifest.dtype,
        target=manifest.target.name,
        versions=manifest.target.versions,
        num_hidden_layers=manifest.plan.num_hidden_layers,
        num_tail_layers=manifest.plan.num_tail_layers,
        boundary=manifest.boundary,
        boundary_window=manifest.boundary_window,
        calibrated_on=None if calibration is None else calibration.data,
        built_with=manifest.build.pop_engine_version,
        peak_memory_bytes=peak_memory_bytes,
    )


def is_within(benefit: Estimate | None, max_loss_percent: float | None) -> bool | None:
    """Whether the benefit lost stays within the limit; None without a limit. What cannot be measured does not."""
    if max_loss_percent is None:
        return None
    return benefit is not None and benefit.value >= 1 - max_loss_percent / 100


def longest_within(rows: tuple[SweepRow, ...]) -> int | None:
    """Index of the longest tail within the limit."""
    candidates = [
        (row.num_tail_layers, row.scores.benefit.value, index)
        for index, row in enumerate(rows)
        if row.within_max_loss and row.scores is not None and row.scores.benefit is not None
    ]
    return max(candidates)[2] if candidates else None
