"""What pop-bench measured, as the README shows it: times to the first token, and the peers beside us."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench.result import FULL, POP, BatchRow, BenchResult, BenchRun, Timing
from pop_engine.tools.markdown import markdown_table, origin


def render_ttft(result: BenchResult) -> str:
    """POP against the full engine and the bound."""
    (run,) = result.runs
    facts = run.engines[0].facts
    assert facts is not None, "the first is POP"
    rows = []
    for row in run.rows:
        pop, full = (_timing(row, name) for name in (POP, FULL))
        assert pop is not None
        assert full is not None
        assert full.ttft_ratio is not None
        figures = [f"**{full.ttft_ratio.median:.2f}×**", f"{row.bound:.2f}×", f"{row.ratio_to_bound:.2f}"]
        rows.append([str(row.input_len), _spread(full.ttft_ms), _spread(pop.ttft_ms), *figures])
    header = ["prompt tokens", "full engine, ms", "POP, ms", "ratio", "bound", "ratio / bound"]
    return (
        f"**Time to the first token**, {facts.model}, {facts.num_tail_layers} tail layers, {facts.boundary}; median "
        f"(10th to 90th percentile) of {run.repeats} alternating runs, and the median of their ratios. The bound "
        "counts the floating-point operations of all matrix products, attention's included. "
        f"{origin(run.machine)}\n\n" + markdown_table(header, rows)
    )


@dataclass(frozen=True)
class _Cell:
    """One engine's medians in one run; ratios are its time over POP's, 1 for POP."""

    engine: str
    dtype: str
    is_peer: bool
    timing: Timing

    @property
    def ttft_ratio(self) -> float:
        return 1.0 if self.timing.ttft_ratio is None else self.timing.ttft_ratio.median

    @property
    def tpot_ratio(self) -> float:
        return 1.0 if self.timing.tpot_ratio is None else self.timing.tpot_ratio.median


def render_peers(result: BenchResult) -> str:
    """Everyone's first token and decode step at each prompt length, in the order of POP's first token."""
    columns = _columns(result)
    last = columns[max(columns)]
    names = sorted({cell.engine for cells in columns.values() for cell in cells}, key=lambda name: _rank(name, last))
    engines = [engine for run in result.runs for engine in run.engines]
    repeats = [run.repeats for run in result.runs]
    peaks = {
        engine.name: max(one.peak_memory_bytes for one in engines if one.name == engine.name) for engine in engines
    }
    rows = [[name, *_figures(name, columns), f"{peaks[name] / 1e6:,.0f}"] for name in names]
    header = ["engine", *(f"{title}, {length} tokens" for length in columns for title in ("TTFT ms", "ms a token"))]
    run = result.runs[0]
    rounds = " to ".join(str(bound) for bound in sorted({min(repeats), max(repeats)}))
    stored = "llama.cpp as stored runs the checkpoint's own GGUF file. " if any("as stored" in n for n in names) else ""
    return (
        f"**Other engines** on the same checkpoint, {run.threads} threads, greedy, the same prompts, "
        f"{run.rows[0].output_len} tokens out, one sequence; medians of {rounds} rounds in which all took turns with "
        f"POP, and how many times POP's time that is. {' '.join(_sentences(columns))} {_decode_bound(result)}"
        f"{stored}{_versions(result)} "
        f"{origin(*(run.machine for run in result.runs))}\n\n" + markdown_table([*header, "peak MB"], rows)
    )


def _columns(result: BenchResult) -> dict[int, list[_Cell]]:
    """Everyone's cell by prompt length. Where several runs have an engine at a length, the first counts."""
    columns: dict[int, list[_Cell]] = {}
    for run in result.runs:
        for row in run.rows:
            if row.batch_size == 1:
                cells = columns.setdefault(row.input_len, [])
                known = {cell.engine for cell in cells}
                cells += [cell for cell in _cells(run, row) if cell.engine not in known]
    return dict(sorted(columns.items()))


def _cells(run: BenchRun, row: BatchRow) -> list[_Cell]:
    engines = {engine.name: engine for engine in run.engines}
    return [
        _Cell(timing.engine, engines[timing.engine].dtype, engines[timing.engine].kind == "peer", timing)
        for timing in row.timings
    ]


def _rank(name: str, cells: Sequence[_Cell]) -> float:
    return next((cell.timing.ttft_ms.median for cell in cells if cell.engine == name), float("inf"))


def _figures(name: str, columns: dict[int, list[_Cell]]) -> Iterator[str]:
    for cells in columns.values():
        cell = next((cell for cell in cells if cell.engine == name), None)
        if cell is None:
            yield from ("", "")
            continue
        yield f"{cell.timing.ttft_ms.median:,.0f} ({cell.ttft_ratio:.2f}×)"
        tpot = cell.timing.tpot_ms
        yield "" if tpot is None else f"{tpot.median:.1f} ({cell.tpot_ratio:.2f}×)"


def _sentences(columns: dict[int, list[_Cell]]) -> Iterator[str]:
    """The three ratios that matter, at every length."""
    for length, cells in columns.items():
        peers = [cell for cell in cells if cell.is_peer]
        if not peers:
            continue
        first = min(peers, key=lambda cell: cell.ttft_ratio)
        yield (
            f"At {length:,} tokens the first token comes {first.ttft_ratio:.2f}× sooner than from the best peer "
            f"({first.engine})"
        )
        alike = [cell for cell in peers if cell.dtype == "fp32"]
        others = [cell for cell in peers if cell.dtype != "fp32"]
        if alike:
            best = min(alike, key=lambda cell: cell.tpot_ratio)
            yield f"and a decode step takes the best fp32 peer ({best.engine}) {best.tpot_ratio:.2f}× as long;"
        if others:
            best = min(others, key=lambda cell: cell.tpot_ratio)
            yield f"our fp32 step takes {1 / best.tpot_ratio:.2f}× as long as that of {best.engine}."


def _decode_bound(result: BenchResult) -> str:
    """What reading the weights alone takes on this machine, where its rates were measured."""
    found = [
        (row.tpot_bound_ms, run.rates.bytes_per_second)
        for run in result.runs
        for row in run.rows
        if row.tpot_bound_ms is not None and run.rates is not None
    ]
    if not found:
        return ""
    milliseconds, bytes_per_second = min(found)
    return (
        f"Reading fp32 weights once takes {milliseconds:.1f} ms at {bytes_per_second / 1e9:.1f} GB/s, "
        "the best that a product of a matrix and a vector reaches here; no fp32 decode step can be faster. "
    )


def _versions(result: BenchResult) -> str:
    found = {
        f"{name} {version}"
        for run in result.runs
        for engine in run.engines
        if engine.kind == "peer"
        for name, version in engine.versions.items()
    }
    return f"Versions: {', '.join(sorted(found))}."


def _timing(row: BatchRow, name: str) -> Timing | None:
    return next((timing for timing in row.timings if timing.engine == name), None)


def _spread(found: Percentiles) -> str:
    return f"{found.median:.1f} ({found.p10:.1f} to {found.p90:.1f})"
