"""The README's tables of pop-bench's results."""

from dataclasses import replace

from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench.result import FULL, POP, BatchRow, BenchResult, BenchRun, EngineRecord, Kind, Timing
from pop_engine.tools.bench_figures import render_peers, render_ttft
from pop_engine.tools.bench_result import EngineFacts
from pop_engine.tools.bound import MachineRates
from pop_engine.tools.machine import Machine

MACHINE = Machine("Zen", 2, 25_000_000_000, "3.11", "2.4", "1.32.0", "abc", "2026-11-30T00:00:00+00:00")
FACTS = EngineFacts("pop", "smollm2", "fp32", "ort-cpu", {}, "one-pass", 10, 700_000_000)


def exactly(value: float) -> Percentiles:
    return Percentiles.of([value])


def timing(engine: str, ttft: float, tpot: float) -> Timing:
    """POP's first token comes after 100 ms, each later one after 20."""
    of_ttft, of_tpot = (None, None) if engine == POP else (exactly(ttft / 100), exactly(tpot / 20))
    return Timing(engine, exactly(ttft), exactly(tpot), exactly(tpot), exactly(30.0), of_ttft, of_tpot, 64)


def record(name: str, kind: Kind, dtype: str, versions: dict[str, str]) -> EngineRecord:
    return EngineRecord(name, kind, dtype, versions, FACTS if kind == "pop" else None, 700_000_000)


ENGINES = (
    record(POP, "pop", "fp32", {"onnxruntime": "1.32.0"}),
    record(FULL, "full", "fp32", {}),
    record("a, fp32", "peer", "fp32", {"a": "1.0"}),
    record("b, int4", "peer", "int4", {"b": "2.0"}),
)


def run(input_len: int, *timings: Timing) -> BenchRun:
    row = BatchRow(input_len, 64, 1, 1.45, None, 0.9, timings)
    return BenchRun(MACHINE, 2, 5, 0, 1.455, ENGINES, (), (row,), ())


def test_peers_of_several_runs_are_one_table_in_the_order_of_their_first_token() -> None:
    own = timing(POP, 100, 20)
    runs = (
        run(512, own, timing("a, fp32", 400, 26)),
        run(512, replace(own, ttft_ms=exactly(104)), timing("b, int4", 300, 8)),
        run(1024, own, timing("a, fp32", 500, 30)),
    )
    text = render_peers(BenchResult(runs))
    assert text.splitlines()[2:] == [
        "| engine | TTFT ms, 512 tokens | ms a token, 512 tokens | TTFT ms, 1024 tokens | ms a token, 1024 tokens |"
        " peak MB |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| POP | 100 (1.00×) | 20.0 (1.00×) | 100 (1.00×) | 20.0 (1.00×) | 700 |",
        "| a, fp32 | 400 (4.00×) | 26.0 (1.30×) | 500 (5.00×) | 30.0 (1.50×) | 700 |",
        "| b, int4 | 300 (3.00×) | 8.0 (0.40×) |  |  | 700 |",
    ]
    assert "At 512 tokens the first token comes 3.00× sooner than from the best peer (b, int4)" in text
    assert "the best fp32 peer (a, fp32) 1.30× as long; our fp32 step takes 2.50× as long as that of b, int4." in text
    assert "At 1,024 tokens the first token comes 5.00× sooner" in text
    assert "Versions: a 1.0, b 2.0. (Zen, 2 cores, `abc`, 2026-11-30)" in text


def test_every_runs_rounds_and_commit_are_named() -> None:
    first = run(512, timing(POP, 100, 20), timing("a, fp32", 400, 26))
    later = replace(first, repeats=3, machine=replace(MACHINE, commit="def"))
    text = render_peers(BenchResult((first, later, later)))
    assert "medians of 3 to 5 rounds" in text
    assert "(Zen, 2 cores, `abc`, 2026-11-30) (Zen, 2 cores, `def`, 2026-11-30)\n" in text
    assert "medians of 5 rounds" in render_peers(BenchResult((first,)))


def test_the_bound_of_decode_is_the_shortest_time_that_was_measured() -> None:
    def measured(milliseconds: float, bytes_per_second: float) -> BenchRun:
        first = run(512, timing(POP, 100, 20), timing("a, fp32", 400, 26))
        row = replace(first.rows[0], tpot_bound_ms=milliseconds)
        return replace(first, rows=(row,), rates=MachineRates(150e9, bytes_per_second))

    text = render_peers(BenchResult((measured(26.3, 20.5e9), measured(22.4, 24.0e9))))
    assert "Reading fp32 weights once takes 22.4 ms at 24.0 GB/s" in text


def test_ttft_stands_beside_the_bound() -> None:
    text = render_ttft(BenchResult((run(512, timing(POP, 100, 20), timing(FULL, 132.0, 20)),)))
    assert text.splitlines()[-1] == (
        "| 512 | 132.0 (132.0 to 132.0) | 100.0 (100.0 to 100.0) | **1.32×** | 1.45× | 0.90 |"
    )
    assert "10 tail layers, one-pass; median" in text
