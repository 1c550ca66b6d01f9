"""Peak memory of pop-run against what it must hold: `python -m pop_engine.tools.bench_memory ENGINE… --prompt FILE`.

The yardstick is 1.15 times the weights, plus the cache of the tokens used, plus 200 MB for Python, ONNX Runtime and
one chunk's activations.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pop_engine.configs.errors import EngineError, exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.whole_file import write_json
from pop_engine.tools.bench_result import EngineFacts, describe_engine_facts
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows, format_bytes

WEIGHTS_FACTOR = 1.15
OVERHEAD_BYTES = 200_000_000


@dataclass(frozen=True)
class MemoryRow:
    """One engine, run once in a process of its own."""

    engine: EngineFacts
    weight_bytes: int
    num_tokens: int
    cache_bytes: int
    budget_bytes: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class MemoryResult:
    """One run of the benchmark."""

    machine: Machine
    rows: tuple[MemoryRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="bench_memory", description="Peak memory of pop-run.")
    parser.add_argument("engines", metavar="ENGINE", nargs="+", type=Path)
    parser.add_argument("--prompt", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return exit_with_message("bench_memory", lambda: bench_memory(parser.parse_args(argv)))


def bench_memory(options: argparse.Namespace) -> int:
    """Run each engine, print, and write the JSON file."""
    rows = tuple(measure(directory, options.prompt, options.max_tokens) for directory in options.engines)
    cells = [["engine", "boundary", "weights", "cache", "peak", "budget"]]
    for row in rows:
        sizes = (row.weight_bytes, row.cache_bytes, row.peak_memory_bytes, row.budget_bytes)
        cells.append([row.engine.directory, row.engine.boundary, *map(format_bytes, sizes)])
    print("\n".join(align_rows(cells)))
    if options.json is not None:
        result = MemoryResult(describe_machine(), rows)
        write_json(options.json, result)
    return 0


def measure(directory: Path, prompt: Path, max_tokens: int) -> MemoryRow:
    """Run pop-run and read what it says of itself."""
    manifest = Manifest.load(directory)
    assert manifest.weights is not None
    command = [sys.executable, "-m", "pop_engine.runtime.cli", str(directory), str(prompt)]
    command += ["--json", "--ignore-eos", "--max-tokens", str(max_tokens)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise EngineError(f"{directory}: pop-run failed ({finished.stderr.strip()})")
    report = msgspec.json.decode(finished.stdout)
    num_tokens = report["metrics"]["num_prompt_tokens"] + report["metrics"]["num_output_tokens"]
    cache_bytes = num_tokens * manifest.cache.bytes_per_token(4)
    peak = int(report["peak_memory_bytes"])
    return MemoryRow(
        engine=describe_engine_facts(str(directory), manifest, peak),
        weight_bytes=manifest.weights.num_bytes,
        num_tokens=num_tokens,
        cache_bytes=cache_bytes,
        budget_bytes=int(WEIGHTS_FACTOR * manifest.weights.num_bytes) + cache_bytes + OVERHEAD_BYTES,
        peak_memory_bytes=peak,
    )


if __name__ == "__main__":
    sys.exit(main())
