"""The rows of a run: every prompt length and batch size, then every load."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pop_engine.configs.manifest import DType, Manifest
from pop_engine.tools.bench.contest import Entrant, alternate
from pop_engine.tools.bench.entrants import Participants
from pop_engine.tools.bench.options import BenchOptions
from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench.result import FULL, BatchRow, BenchRun, LoadRow, LoadTiming, Timing
from pop_engine.tools.bench_message import BenchReply, BenchRequest
from pop_engine.tools.bound import matmul_bound, roofline_bound, ttft_bound, weight_bytes_read
from pop_engine.tools.machine import describe_machine

_ITEM_BYTES: dict[DType, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
# Enough that the first requests, which all arrive at once, and the last ones, which run alone, are not everything.
_REQUESTS_IN_FLIGHT = 4

Prompts = tuple[tuple[int, ...], ...]
Reader = Callable[[BenchReply], float]


@dataclass(frozen=True)
class PromptSource:
    """Random tokens of the model's vocabulary, the same for every engine; the seed decides them."""

    generator: random.Random
    vocab_size: int

    def prompts(self, count: int, length: int) -> Prompts:
        """So many prompts of one length."""
        return tuple(tuple(self.generator.randrange(self.vocab_size) for _ in range(length)) for _ in range(count))


def measure(options: BenchOptions, pop: Manifest, input_lens: Sequence[int], participants: Participants) -> BenchRun:
    """Run everything."""
    source = PromptSource(random.Random(options.seed), pop.dims.vocab_size)
    rows = tuple(
        measure_batch(options, pop, participants.entrants, source.prompts(batch_size, input_len))
        for input_len in input_lens
        for batch_size in options.batch_sizes
    )
    loads = tuple(measure_loads(options, participants, source, input_lens))
    return BenchRun(
        machine=describe_machine(),
        threads=options.threads,
        repeats=options.repeats,
        seed=options.seed,
        matmul_bound=matmul_bound(pop.dims, pop.plan),
        engines=tuple(member.record() for member in participants.members),
        absent=participants.all_absent(),
        rows=rows,
        loads=loads,
        rates=options.rates,
    )


def measure_batch(options: BenchOptions, pop: Manifest, entrants: Sequence[Entrant], prompts: Prompts) -> BatchRow:
    """Everyone on the same prompts, in turns."""
    batch_size, input_len = len(prompts), len(prompts[0])
    request = BenchRequest(prompts, options.output_len - 1)
    replies = alternate(entrants, options.repeats, request, f"{batch_size} x {input_len} tokens")
    answers = {entrant.name: found for entrant, found in zip(entrants, replies, strict=True) if found}
    expected = answers[FULL][0].tokens[0] if FULL in answers else None
    own = next(iter(answers.values()))
    timings = tuple(
        make_timing(name, found, None if found is own else own, expected) for name, found in answers.items()
    )
    bound = ttft_bound(pop.dims, pop.plan, input_len)
    full_ratio = next((timing.ttft_ratio for timing in timings if timing.engine == FULL), None)
    roofline = tpot_bound = None
    if options.rates is not None:
        item_bytes = _ITEM_BYTES[pop.dtype]
        roofline = roofline_bound(pop.dims, pop.plan, input_len, item_bytes, options.rates, pop.boundary)
        tpot_bound = weight_bytes_read(pop.dims, pop.plan, 1, item_bytes) / options.rates.bytes_per_second * 1e3
    return BatchRow(
        input_len=input_len,
        output_len=options.output_len,
        batch_size=batch_size,
        bound=bound,
        roofline_bound=roofline,
        ratio_to_bound=None if full_ratio is None else full_ratio.median / bound,
        timings=timings,
        tpot_bound_ms=tpot_bound,
    )


def make_timing(
    name: str, replies: Sequence[BenchReply], own: Sequence[BenchReply] | None, expected: Sequence[int] | None
) -> Timing:
    """One engine's rounds. `own` are POP's replies of the same rounds, None for POP itself."""
    return Timing(
        engine=name,
        ttft_ms=Percentiles.of([ms for reply in replies for ms in reply.ttft_ms]),
        tpot_ms=Percentiles.of_any([fmean(reply.step_ms) for reply in replies if reply.step_ms]),
        itl_ms=Percentiles.of_any([ms for reply in replies for ms in reply.step_ms]),
        tokens_per_second=Percentiles.of([_tokens_per_second(reply) for reply in replies]),
        ttft_ratio=None if own is None else Percentiles.of([*_ratios(replies, own, _mean_ttft)]),
        tpot_ratio=None if own is None or not own[0].step_ms else Percentiles.of([*_ratios(replies, own, _mean_step)]),
        num_same_tokens=None if expected is None else count_same(replies[0].tokens[0], expected),
    )


def _ratios(replies: Sequence[BenchReply], own: Sequence[BenchReply], read: Reader) -> Iterator[float]:
    # Both of a pair ran within one round, so that a machine that slows down slows both.
    return (read(reply) / read(mine) for reply, mine in zip(replies, own, strict=True))


def count_same(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    differing = (idx for idx, (one, other) in enumerate(zip(tokens, expected, strict=False)) if one != other)
    return next(differing, min(len(tokens), len(expected)))


def measure_loads(
    options: BenchOptions, participants: Participants, source: PromptSource, input_lens: Sequence[int]
) -> Iterator[LoadRow]:
    """Our engines with requests in flight; peers have no continuous batching that is ours to drive."""
    for input_len in input_lens:
        for concurrency in options.concurrency:
            num_requests = options.num_requests or _REQUESTS_IN_FLIGHT * concurrency
            prompts = source.prompts(num_requests, input_len)
            request = BenchRequest(prompts, options.output_len - 1, concurrency=concurrency)
            entrants = participants.own_entrants
            title = f"{num_requests} requests of {input_len} tokens, {concurrency} in flight"
            replies = alternate(entrants, options.repeats, request, title)
            timings = (make_load_timing(entrant.name, found) for entrant, found in zip(entrants, replies, strict=True))
            yield LoadRow(input_len, options.output_len, concurrency, num_requests, tuple(timings))


def make_load_timing(name: str, replies: Sequence[BenchReply]) -> LoadTiming:
    """One engine's rounds under a load."""
    requests = [times for reply in replies for times in reply.token_ms]
    gaps = [[later - earlier for earlier, later in pairwise(times)] for times in requests]
    return LoadTiming(
        engine=name,
        ttft_ms=Percentiles.of([times[0] for times in requests]),
        tpot_ms=Percentiles.of_any([fmean(of_one) for of_one in gaps if of_one]),
        itl_ms=Percentiles.of_any([gap for of_one in gaps for gap in of_one]),
        latency_ms=Percentiles.of([times[-1] for times in requests]),
        tokens_per_second=Percentiles.of([sum(map(len, reply.token_ms)) / reply.wall_ms * 1000 for reply in replies]),
        requests_per_second=Percentiles.of([len(reply.token_ms) / reply.wall_ms * 1000 for reply in replies]),
    )


def _tokens_per_second(reply: BenchReply) -> float:
    num_tokens = len(reply.ttft_ms) * (1 + len(reply.step_ms))
    return num_tokens / (reply.ttft_ms[-1] + sum(reply.step_ms)) * 1000


def _mean_ttft(reply: BenchReply) -> float:
    return fmean(reply.ttft_ms)


def _mean_step(reply: BenchReply) -> float:
    return fmean(reply.step_ms)
