"""A run as tables for people."""

from collections.abc import Sequence

from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench.result import BatchRow, BenchRun, LoadRow
from pop_engine.tools.table import align_rows, format_bytes

_NOTHING = "-"


def format_run(run: BenchRun) -> str:
    """What was measured, a table a prompt length and batch size, then loads, memory, and who is missing."""
    blocks = [_header(run), *map(_batch, run.rows), *map(_load, run.loads), _memory(run), _absent(run)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _header(run: BenchRun) -> list[str]:
    machine, facts = run.machine, run.engines[0].facts
    assert facts is not None, "the first is POP"
    return [
        f"{facts.model}, {facts.dtype}, {facts.target}, {facts.num_tail_layers} tail layers, {facts.boundary}, "
        f"{run.threads} threads, {run.repeats} rounds in turns",
        f"{machine.cpu_model}, {machine.num_cores} cores, {format_bytes(machine.memory_bytes)}, "
        f"onnxruntime {machine.onnxruntime_version}, commit {machine.commit}, {machine.date}",
        f"the paper's bound, matrix products alone: {run.matmul_bound:.3f}{_rates(run)}",
    ]


def _rates(run: BenchRun) -> str:
    if run.rates is None:
        return ""
    return f"; {run.rates.flops_per_second / 1e9:.0f} GFLOP/s, {run.rates.bytes_per_second / 1e9:.1f} GB/s"


def _batch(row: BatchRow) -> list[str]:
    bounds = [f"bound {row.bound:.3f}"]
    if row.roofline_bound is not None:
        bounds.append(f"roofline {row.roofline_bound:.3f}")
    if row.tpot_bound_ms is not None:
        bounds.append(f"all weights read once {row.tpot_bound_ms:.1f} ms")
    if row.ratio_to_bound is not None:
        bounds.append(f"of it reached {row.ratio_to_bound:.3f}")
    titles = ["", "TTFT ms", "p10-p90", "p99", "TPOT ms", "p10-p90", "ITL p99", "tok/s", "TTFT x", "TPOT x", "same"]
    cells = [
        [
            timing.engine,
            *_spread(timing.ttft_ms),
            f"{timing.ttft_ms.p99:.1f}",
            *_spread(timing.tpot_ms),
            _figure(None if timing.itl_ms is None else timing.itl_ms.p99, 1),
            f"{timing.tokens_per_second.median:.1f}",
            _figure(_median(timing.ttft_ratio), 3),
            _figure(_median(timing.tpot_ratio), 3),
            _NOTHING if timing.num_same_tokens is None else str(timing.num_same_tokens),
        ]
        for timing in row.timings
    ]
    batch = f", {row.batch_size} at once" if row.batch_size > 1 else ""
    return [
        f"{row.input_len} tokens in, {row.output_len} out{batch} ({', '.join(bounds)}; x: that engine's time over "
        "POP's, by round; same: tokens equal to the full engine's before the first that differs)",
        *_align([titles, *cells]),
    ]


def _load(row: LoadRow) -> list[str]:
    titles = ["", "TTFT ms", "p99", "TPOT ms", "p99", "ITL p99", "latency ms", "p99", "tok/s", "requests/s"]
    cells = [
        [
            timing.engine,
            *_tail(timing.ttft_ms),
            *_tail(timing.tpot_ms),
            _figure(None if timing.itl_ms is None else timing.itl_ms.p99, 1),
            *_tail(timing.latency_ms),
            f"{timing.tokens_per_second.median:.1f}",
            f"{timing.requests_per_second.median:.3f}",
        ]
        for timing in row.timings
    ]
    title = (
        f"{row.num_requests} requests, {row.concurrency} in flight, {row.input_len} tokens in, {row.output_len} out "
        "(median and p99; from arrival, waiting included)"
    )
    return [title, *_align([titles, *cells])]


def _memory(run: BenchRun) -> list[str]:
    cells = [[engine.name, format_bytes(engine.peak_memory_bytes)] for engine in run.engines]
    return ["peak memory of each process, loading included", *_align(cells)]


def _absent(run: BenchRun) -> list[str]:
    return [f"not measured: {peer.name}: {peer.reason}" for peer in run.absent]


def _spread(found: Percentiles | None) -> list[str]:
    return [_NOTHING] * 2 if found is None else [f"{found.median:.1f}", f"{found.p10:.1f}-{found.p90:.1f}"]


def _tail(found: Percentiles | None) -> list[str]:
    return [_NOTHING] * 2 if found is None else [f"{found.median:.1f}", f"{found.p99:.1f}"]


def _median(found: Percentiles | None) -> float | None:
    return None if found is None else found.median


def _figure(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    return align_rows(rows, frozenset(range(1, len(rows[0]))), indent="  ")
