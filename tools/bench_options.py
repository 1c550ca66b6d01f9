"""What a user asks of bench, checked before minutes are spent on it."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.bound import MachineRates


@dataclass(frozen=True)
class BenchOptions:
    """The command line, checked."""

    engine: Path
    against: Path
    input_lens: tuple[int, ...]
    decode_batches: tuple[int, ...]
    decode_context_len: int
    num_decode_steps: int
    repeats: int
    seed: int
    threads: int | None
    rates: MachineRates | None
    json_file: Path | None


def parse_options(argv: Sequence[str] | None) -> BenchOptions:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="bench", description="Time a POP engine against the full engine.")
    parser.add_argument("engine", metavar="ENGINE", type=Path)
    parser.add_argument("--against", metavar="FULL_ENGINE", type=Path, required=True, help="built with --tail-layers 0")
    parser.add_argument("--input-len", type=parse_counts, default=(32, 128, 512, 1024, 2048), metavar="N,N…")
    parser.add_argument("--decode-batch", type=parse_counts, default=(1, 4, 8), metavar="N,N…", help="'' for none")
    parser.add_argument("--decode-context", type=int, default=128, help="prompt tokens before the timed steps")
    parser.add_argument("--decode-steps", type=int, default=16, help="timed steps per round")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--gflops", type=float, help="measured GFLOP/s of a large product, for the roofline bound")
    parser.add_argument("--gbytes", type=float, help="measured GB/s read from memory, for the roofline bound")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to this file")
    found = parser.parse_args(argv)
    if min(found.repeats, found.decode_steps, found.decode_context) < 1:
        parser.error("--repeats, --decode-steps and --decode-context: expected whole numbers of at least 1")
    if (found.gflops is None) != (found.gbytes is None):
        parser.error("--gflops and --gbytes: the roofline bound needs both")
    return BenchOptions(
        engine=found.engine,
        against=found.against,
        input_lens=found.input_len,
        decode_batches=found.decode_batch,
        decode_context_len=found.decode_context,
        num_decode_steps=found.decode_steps,
        repeats=found.repeats,
        seed=found.seed,
        threads=found.threads,
        rates=None if found.gflops is None else MachineRates(found.gflops * 1e9, found.gbytes * 1e9),
        json_file=found.json,
    )


def parse_counts(text: str) -> tuple[int, ...]:
    """`32,128` as numbers. Raises ArgumentTypeError, which argparse turns into its usage message."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers of at least 1 between commas")
    return counts


def check_pair(options: BenchOptions, pop: Manifest, full: Manifest) -> None:
    """Raise UsageError where the two are no fair pair, or are asked for more than they hold."""
    if full.plan.num_tail_layers:
        raise UsageError(
            f"--against {options.against}: has {full.plan.num_tail_layers} tail layers; "
            "expected a full engine, built with --tail-layers 0"
        )
    properties: tuple[tuple[str, Callable[[Manifest], object]], ...] = (
        ("dimensions", lambda manifest: manifest.dims),
        ("dtype", lambda manifest: manifest.dtype),
        ("target", lambda manifest: manifest.target.name),
        ("max_seq_len", lambda manifest: manifest.limits.max_seq_len),
    )
    for name, read in properties:
        if read(pop) != read(full):
            raise UsageError(
                f"--against {options.against}: {name} {read(full)}, but {options.engine} has {read(pop)}; "
                "build both from one model with the same options"
            )
    for manifest, path in ((pop, options.engine), (full, options.against)):
        _check_limits(options, manifest, path)
    if options.json_file is not None and not options.json_file.parent.is_dir():
        raise UsageError(
            f"--json {options.json_file}: the folder {options.json_file.parent} does not exist; make it first"
        )


def _check_limits(options: BenchOptions, manifest: Manifest, path: Path) -> None:
    max_seq_len, max_batch_size = manifest.limits.max_seq_len, manifest.limits.max_batch_size
    longest = max(options.input_lens, default=0)
    if longest > max_seq_len:
        raise UsageError(f"--input-len {longest}: {path} holds {max_seq_len} tokens; give {max_seq_len} or less")
    if options.decode_batches and options.decode_context_len + options.num_decode_steps > max_seq_len:
        raise UsageError(
            f"--decode-context {options.decode_context_len}: with its steps, more than {max_seq_len} tokens"
        )
    largest = max(options.decode_batches, default=0)
    if largest > max_batch_size:
        raise UsageError(f"--decode-batch {largest}: {path} holds {max_batch_size} sequences; give fewer")
