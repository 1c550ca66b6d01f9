"""What a benchmark found, with all that a figure needs beside it. Written as JSON, printed as tables."""

from dataclasses import dataclass

from pop_engine.configs.manifest import Manifest
from pop_engine.tools.machine import Machine
from pop_engine.tools.spread import Spread
from pop_engine.tools.table import align_rows, format_bytes


@dataclass(frozen=True)
class TtftRow:
    """Time to first token at one prompt length. `roofline_bound` needs rates that were measured before."""

    input_len: int
    pop: Spread
    full: Spread
    ratio: float
    bound: float
    ratio_to_bound: float
    roofline_bound: float | None


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


@dataclass(frozen=True)
class BenchResult:
    """One run of the benchmark."""

    machine: Machine
    pop: EngineFacts
    full: EngineFacts
    threads: int | None
    seed: int
    matmul_bound: float
    decode_context_len: int
    ttft: tuple[TtftRow, ...]
    decode: tuple[DecodeRow, ...]


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


def format_result(result: BenchResult) -> str:
    """Tables for people: what was measured, time to first token, decode, memory."""
    machine, pop = result.machine, result.pop
    header = [
        f"{pop.model}, {pop.dtype}, {pop.target}, {pop.num_tail_layers} tail layers, {pop.boundary}, "
        f"{result.threads or 'default'} threads",
        f"{machine.cpu_model}, {machine.num_cores} cores, {format_bytes(machine.memory_bytes)}, "
        f"onnxruntime {machine.onnxruntime_version}, commit {machine.commit}, {machine.date}",
    ]
    memory = (
        f"peak memory: POP {format_bytes(pop.peak_memory_bytes)}, full {format_bytes(result.full.peak_memory_bytes)}"
    )
    blocks = [header, _ttft_lines(result), _decode_lines(result), [memory]]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _ttft_lines(result: BenchResult) -> list[str]:
    if not result.ttft:
        return []
    rows = [["input", *_SPREAD_TITLES, "ratio", "bound", "of bound", "roofline"]]
    for row in result.ttft:
        roofline = "-" if row.roofline_bound is None else f"{row.roofline_bound:.3f}"
        figures = [f"{row.ratio:.3f}", f"{row.bound:.3f}", f"{row.ratio_to_bound:.3f}", roofline]
        rows.append([str(row.input_len), *_spread_cells(row.pop), *_spread_cells(row.full), *figures])
    title = f"time to first token, median and p10-p90 (bound of matrix products alone {result.matmul_bound:.3f})"
    return [title, *_align_figures(rows)]


def _decode_lines(result: BenchResult) -> list[str]:
    if not result.decode:
        return []
    rows = [["batch", *_SPREAD_TITLES, "ratio"]]
    for row in result.decode:
        rows.append([str(row.batch_size), *_spread_cells(row.pop), *_spread_cells(row.full), f"{row.ratio:.3f}"])
    return [f"decode step after {result.decode_context_len} tokens, median and p10-p90", *_align_figures(rows)]


_SPREAD_TITLES = ("POP ms", "p10-p90", "full ms", "p10-p90")


def _spread_cells(spread: Spread) -> list[str]:
    return [f"{spread.median:.1f}", f"{spread.p10:.1f}-{spread.p90:.1f}"]


def _align_figures(rows: list[list[str]]) -> list[str]:
    return align_rows(rows, frozenset(range(len(rows[0]))), indent="  ")
