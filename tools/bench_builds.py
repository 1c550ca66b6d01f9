"""Build the engines that the benchmarks need: `python -m pop_engine.tools.bench_builds DIR`."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pop_engine.configs.errors import EngineError, exit_with_message
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.whole_file import write_json
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows, format_bytes

BUILDS: dict[str, tuple[str, ...]] = {
    "pop": ("--model", "smollm2-135m"),
    "full": ("--model", "smollm2-135m", "--tail-layers", "0"),
    "two-step": ("--model", "smollm2-135m", "--boundary", "two-step"),
}
# Also measured, to show what a build takes; no benchmark runs them.
LARGE_MODELS = ("llama-3.1-8b", "gemma-3-12b", "qwen3-vl-8b")
_RTX = ("--target", "tensorrt-rtx")
BUILDS |= {name: ("--model", name, "--no-weights") for name in LARGE_MODELS}
BUILDS |= {"rtx": ("--model", "smollm2-135m", *_RTX)}
BUILDS |= {f"{name}-rtx": ("--model", name, "--no-weights", *_RTX) for name in LARGE_MODELS}

_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
_ATTENTIONS = ("GroupQueryAttention", "Attention", "MultiHeadAttention")


@dataclass(frozen=True)
class OperatorCounts:
    """How much is in a graph."""

    products: int
    attentions: int
    total: int


@dataclass(frozen=True)
class BuildRow:
    """One build: the command's wall time, and the peak resident size of all its processes.

    `operators` has each graph's matrix products and attentions, and its number of operators.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: float
    peak_memory_bytes: int
    step_seconds: dict[str, float]
    weight_bytes: int
    plan_bytes: int = 0
    operators: dict[str, OperatorCounts] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildsResult:
    """One run of all builds, one after another."""

    machine: Machine
    rows: tuple[BuildRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="bench_builds", description="Build the engines that the benchmarks need.")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the engines are written below it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=BUILDS, default=tuple(BUILDS), metavar="NAME", help="some of them")
    return exit_with_message("bench_builds", lambda: bench_builds(parser.parse_args(argv)))


def bench_builds(options: argparse.Namespace) -> int:
    """Build, print, and write the JSON file, after every build what there is."""
    cells = [["build", "seconds", "peak memory", "weights"]]
    rows: list[BuildRow] = []
    for name in options.only:
        row = build(name, BUILDS[name], options.directory / name)
        rows.append(row)
        cells.append([row.name, f"{row.seconds:.0f}", *map(format_bytes, (row.peak_memory_bytes, row.weight_bytes))])
        if options.json is not None:
            result = BuildsResult(describe_machine(), tuple(rows))
            write_json(options.json, result)
    print("\n".join(align_rows(cells)))
    return 0


def build(name: str, arguments: tuple[str, ...], out: Path) -> BuildRow:
    """Run pop-build as a user would. Raises EngineError where it fails."""
    command = [sys.executable, "-m", "pop_engine.builder.cli", *arguments, "--out", str(out), "--force"]
    started = time.perf_counter()
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if finished.returncode != 0:
        raise EngineError(f"{name}: pop-build failed ({finished.stderr.strip()})")
    manifest = Manifest.load(out)
    record, weights, graphs = manifest.build, manifest.weights, _graphs(manifest)
    return BuildRow(
        name,
        arguments,
        round(seconds, 1),
        record.peak_memory_bytes,
        record.step_seconds,
        0 if weights is None else weights.num_bytes,
        sum(graph.plan.num_bytes for graph in graphs.values() if graph.plan is not None),
        {phase: count_operators(graph) for phase, graph in graphs.items()},
    )


def _graphs(manifest: Manifest) -> dict[str, GraphRecord]:
    graphs = {"prefill": manifest.prefill, "decode": manifest.decode}
    return graphs if manifest.vision is None else graphs | {"vision": manifest.vision.graph}


def count_operators(graph: GraphRecord) -> OperatorCounts:
    """Count what a graph's cost is made of, whatever the target calls it."""
    products, attentions = (sum(graph.operators.get(name, 0) for name in names) for names in (_PRODUCTS, _ATTENTIONS))
    return OperatorCounts(products, attentions, sum(graph.operators.values()))


if __name__ == "__main__":
    sys.exit(main())
