"""Build the engines that the benchmarks need: `python -m pop_engine.tools.bench_builds DIR`."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pop_engine.configs.errors import EngineError, exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows, format_bytes

BUILDS: dict[str, tuple[str, ...]] = {
    "pop": ("--model", "smollm2-135m"),
    "full": ("--model", "smollm2-135m", "--tail-layers", "0"),
    "two-step": ("--model", "smollm2-135m", "--boundary", "two-step"),
    "llama-3.1-8b": ("--model", "llama-3.1-8b", "--no-weights"),
}


@dataclass(frozen=True)
class BuildRow:
    """One build: the command's wall time, and the peak resident size of all its processes."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    peak_memory_bytes: int
    step_seconds: dict[str, float]
    weight_bytes: int


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
    return exit_with_message("bench_builds", lambda: bench_builds(parser.parse_args(argv)))


def bench_builds(options: argparse.Namespace) -> int:
    """Build, print, and write the JSON file."""
    rows = tuple(build(name, arguments, options.directory / name) for name, arguments in BUILDS.items())
    cells = [["build", "seconds", "peak memory", "weights"]]
    for row in rows:
        sizes = (row.peak_memory_bytes, row.weight_bytes)
        cells.append([row.name, f"{row.seconds:.0f}", *map(format_bytes, sizes)])
    print("\n".join(align_rows(cells)))
    if options.json is not None:
        result = BuildsResult(describe_machine(), rows)
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
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
    record, weights = manifest.build, manifest.weights
    return BuildRow(
        name,
        arguments,
        round(seconds, 1),
        record.peak_memory_bytes,
        record.step_seconds,
        0 if weights is None else weights.num_bytes,
    )


if __name__ == "__main__":
    sys.exit(main())
