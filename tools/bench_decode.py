"""Time an engine's decode step against its decode graph alone: `python -m pop_engine.tools.bench_decode ENGINE`.

On ort-cpu the one-pass prefill graph also decodes, so that one packed copy of the weights serves both. This says what
that costs, at equal context lengths, alternating, with one process awake at a time.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.whole_file import write_json
from pop_engine.tools.bench.contest import Contest, measure_decode
from pop_engine.tools.bench_message import BenchRequest
from pop_engine.tools.bench_result import DecodeRow, EngineFacts, describe_engine_facts
from pop_engine.tools.command_line import parse_counts
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows
from pop_engine.tools.worker_process import WorkerProcess

# Steps of each that are not counted: the first ones after a prefill find other data in the processor's caches.
_NUM_SETTLING_STEPS = 24


@dataclass(frozen=True)
class DecodeResult:
    """One run: rows hold the engine as `pop` and the decode graph alone as `full`; `ratio` is alone / engine."""

    machine: Machine
    engine: EngineFacts
    context_len: int
    rows: tuple[DecodeRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="bench_decode", description="Time decode against the decode graph alone.")
    parser.add_argument("engine", metavar="ENGINE", type=Path)
    parser.add_argument("--batch", type=parse_counts, default=(1, 4, 8), metavar="N,N…")
    parser.add_argument("--context", type=int, default=512, help="tokens in each slot before the timed steps")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return exit_with_message("bench_decode", lambda: bench_decode(parser.parse_args(argv)))


def bench_decode(options: argparse.Namespace) -> int:
    """Load both, measure, print, and write the JSON file."""
    manifest = Manifest.load(options.engine)
    arguments = [str(options.engine), "--threads", str(options.threads)]
    generator = random.Random(0)
    with ExitStack() as stack:
        engine, alone = (
            stack.enter_context(
                WorkerProcess([sys.executable, "-m", f"pop_engine.tools.{module}", *arguments], str(options.engine))
            )
            for module in ("bench_worker", "plain_decode")
        )
        contest = Contest(engine, alone, options.repeats)
        rows = tuple(measure(options, contest, generator, batch, manifest.dims.vocab_size) for batch in options.batch)
        facts = describe_engine_facts(str(options.engine), manifest, engine.peak_memory_bytes)
    result = DecodeResult(describe_machine(), facts, options.context, rows)
    print(format_rows(rows))
    if options.json is not None:
        write_json(options.json, result)
    return 0


def measure(
    options: argparse.Namespace, contest: Contest, generator: random.Random, batch: int, vocab_size: int
) -> DecodeRow:
    """One batch size. The engine fills its slots itself; only the steps are timed."""
    prompts = tuple(tuple(generator.randrange(vocab_size) for _ in range(options.context)) for _ in range(batch))
    return measure_decode(contest, BenchRequest(prompts, options.steps, _NUM_SETTLING_STEPS))


def format_rows(rows: Sequence[DecodeRow]) -> str:
    """The table for people."""
    cells = [["batch", "engine ms", "decode graph alone ms", "engine / alone"]]
    for row in rows:
        ratio = row.pop.median / row.full.median
        cells.append([str(row.batch_size), f"{row.pop.median:.1f}", f"{row.full.median:.1f}", f"{ratio:.3f}"])
    return "\n".join(align_rows(cells))


if __name__ == "__main__":
    sys.exit(main())
