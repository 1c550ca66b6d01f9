"""Time POP against the full engine: `python -m pop_engine.tools.bench ENGINE --against FULL_ENGINE`.

The two take turns in one run, each in a process of its own that stands still while the other works.
"""

import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import DType, Manifest
from pop_engine.tools.bench_message import BenchReply, BenchRequest
from pop_engine.tools.bench_options import BenchOptions, check_pair, parse_options
from pop_engine.tools.bench_result import BenchResult, DecodeRow, TtftRow, describe_engine_facts, format_result
from pop_engine.tools.bound import matmul_bound, roofline_bound, ttft_bound
from pop_engine.tools.machine import describe_machine
from pop_engine.tools.spread import Spread
from pop_engine.tools.worker_process import WorkerProcess

_ITEM_BYTES: dict[DType, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


class Worker(Protocol):
    """What times one engine. WorkerProcess is the real one."""

    peak_memory_bytes: int

    def ask(self, request: BenchRequest) -> BenchReply:
        """Run a request and time it."""
        ...


@dataclass(frozen=True)
class Contest:
    """Both workers and how often each takes its turn."""

    pop: Worker
    full: Worker
    repeats: int

    def run(self, request: BenchRequest, title: str) -> tuple[list[BenchReply], list[BenchReply]]:
        """Replies of POP and of the full engine to the same request. A first round warms up and is dropped."""
        replies: tuple[list[BenchReply], list[BenchReply]] = ([], [])
        for round_idx in range(self.repeats + 1):
            show_progress(f"{title}, round {round_idx} of {self.repeats}")
            # Each goes first in every other round, so that a drift of the machine's speed favours neither.
            for worker_idx in (0, 1) if round_idx % 2 else (1, 0):
                reply = (self.pop, self.full)[worker_idx].ask(request)
                if round_idx:
                    replies[worker_idx].append(reply)
        show_progress("")
        return replies


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("bench", lambda: bench(parse_options(argv)))


def bench(options: BenchOptions) -> int:
    """Load both engines, measure, print, and write the JSON file."""
    pop, full = Manifest.load(options.engine), Manifest.load(options.against)
    check_pair(options, pop, full)
    with ExitStack() as stack:
        workers = [stack.enter_context(start_worker(path, options)) for path in (options.engine, options.against)]
        result = measure(options, pop, full, Contest(workers[0], workers[1], options.repeats))
    print(format_result(result), flush=True)
    if options.json_file is not None:
        options.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0


def start_worker(path: Path, options: BenchOptions) -> WorkerProcess:
    """A worker process that has loaded the engine and stands still."""
    show_progress(f"loading {path}")
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    return WorkerProcess([sys.executable, "-m", "pop_engine.tools.bench_worker", str(path), *threads], str(path))


def measure(options: BenchOptions, pop: Manifest, full: Manifest, contest: Contest) -> BenchResult:
    """Run every prompt length and batch size. Prompts are random tokens, the same for both engines."""
    generator = random.Random(options.seed)
    vocab_size = pop.dims.vocab_size
    ttft = tuple(
        measure_ttft(options, pop, contest, _random_prompts(generator, 1, length, vocab_size))
        for length in options.input_lens
    )
    decode = tuple(
        measure_decode(contest, BenchRequest(prompts, options.num_decode_steps))
        for batch in options.decode_batches
        for prompts in [_random_prompts(generator, batch, options.decode_context_len, vocab_size)]
    )
    return BenchResult(
        machine=describe_machine(),
        pop=describe_engine_facts(str(options.engine), pop, contest.pop.peak_memory_bytes),
        full=describe_engine_facts(str(options.against), full, contest.full.peak_memory_bytes),
        threads=options.threads,
        seed=options.seed,
        matmul_bound=matmul_bound(pop.dims, pop.plan),
        decode_context_len=options.decode_context_len,
        ttft=ttft,
        decode=decode,
    )


def measure_ttft(
    options: BenchOptions, manifest: Manifest, contest: Contest, prompts: tuple[tuple[int, ...], ...]
) -> TtftRow:
    """Time to first token of one prompt, and the bounds of its length."""
    dims, plan, input_len = manifest.dims, manifest.plan, len(prompts[0])
    replies = contest.run(BenchRequest(prompts), f"{input_len} tokens")
    pop, full = (Spread.of([ms for reply in side for ms in reply.ttft_ms]) for side in replies)
    ratio, bound = full.median / pop.median, ttft_bound(dims, plan, input_len)
    roofline = None
    if options.rates is not None:
        item_bytes = _ITEM_BYTES[manifest.dtype]
        roofline = roofline_bound(dims, plan, input_len, item_bytes, options.rates, manifest.boundary)
    return TtftRow(
        input_len=input_len,
        pop=pop,
        full=full,
        ratio=ratio,
        bound=bound,
        ratio_to_bound=ratio / bound,
        roofline_bound=roofline,
    )


def measure_decode(contest: Contest, request: BenchRequest) -> DecodeRow:
    """Time of a decode step over all prompts of the request together."""
    replies = contest.run(request, f"decode batch {len(request.prompts)}")
    pop, full = (Spread.of([ms for reply in side for ms in reply.step_ms]) for side in replies)
    return DecodeRow(len(request.prompts), pop, full, full.median / pop.median)


def show_progress(text: str) -> None:
    """Replace the progress line, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _random_prompts(
    generator: random.Random, num_prompts: int, length: int, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(generator.randrange(vocab_size) for _ in range(length)) for _ in range(num_prompts))


if __name__ == "__main__":
    sys.exit(main())
