"""Rows from canned replies, and percentiles against NumPy."""

from dataclasses import replace

import numpy as np
import pytest

from bench_kit import MANIFEST, CannedWorker
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.bench.contest import Entrant
from pop_engine.tools.bench.entrants import Participant, Participants
from pop_engine.tools.bench.measure import count_same, make_load_timing, measure, measure_batch
from pop_engine.tools.bench.options import parse_options
from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench.report import format_run
from pop_engine.tools.bench.result import FULL, POP
from pop_engine.tools.bench_message import BenchReply
from pop_engine.tools.bound import ttft_bound


def reply(ttft: float, *steps: float, tokens: tuple[int, ...] = (5, 6, 7)) -> BenchReply:
    return BenchReply((ttft,), steps, 0, (tokens,))


WARM_UP = reply(999.0, 999.0, 999.0)


def entrants() -> list[Entrant]:
    pop = CannedWorker(WARM_UP, reply(10, 2, 4, tokens=(5, 6, 8)), reply(20, 1, 1, tokens=(5, 6, 8)))
    full = CannedWorker(WARM_UP, reply(15, 2, 2), reply(28, 3, 3))
    peer = CannedWorker(WARM_UP, reply(40, 6, 6, tokens=(4, 6, 7)), reply(40, 8, 8, tokens=(4, 6, 7)))
    return [Entrant(POP, pop), Entrant(FULL, full), Entrant("peer, fp32", peer, is_peer=True)]


def test_rows_are_computed_round_by_round() -> None:
    options = parse_options(["pop", "--repeats", "2", "--output-len", "3"])
    row = measure_batch(options, MANIFEST, entrants(), ((1,) * 512,))
    assert (row.input_len, row.output_len, row.batch_size) == (512, 3, 1)
    assert row.bound == ttft_bound(MANIFEST.dims, MANIFEST.plan, 512)
    assert row.roofline_bound is None
    pop, full, peer = row.timings
    assert [timing.engine for timing in row.timings] == [POP, FULL, "peer, fp32"]
    assert (pop.ttft_ms.median, pop.ttft_ms.count, pop.ttft_ratio, pop.tpot_ratio) == (15, 2, None, None)
    assert pop.tpot_ms is not None
    assert pop.itl_ms is not None
    assert (pop.tpot_ms.mean, pop.tpot_ms.count, pop.itl_ms.mean, pop.itl_ms.count) == (2, 2, 2, 4)
    # Three tokens in 10 + 2 + 4 ms, and in 20 + 1 + 1.
    assert pop.tokens_per_second.mean == pytest.approx((3000 / 16 + 3000 / 22) / 2)
    assert full.ttft_ratio is not None
    assert full.tpot_ratio is not None
    assert full.ttft_ratio.mean == pytest.approx((15 / 10 + 28 / 20) / 2)
    assert full.tpot_ratio.mean == pytest.approx((2 / 3 + 3 / 1) / 2)
    assert row.ratio_to_bound == pytest.approx(1.45 / row.bound)
    assert [timing.num_same_tokens for timing in row.timings] == [2, 3, 0]
    assert peer.ttft_ratio is not None
    assert peer.ttft_ratio.median == pytest.approx(3.0)


def test_one_token_has_no_time_between_tokens() -> None:
    options = parse_options(["pop", "--repeats", "1", "--output-len", "1", "--gflops", "100", "--gbytes", "10"])
    one = [BenchReply((8.0, 16.0), (), 0, ((5,), (6,)))] * 2
    row = measure_batch(options, MANIFEST, [Entrant(POP, CannedWorker(*one))], ((1,) * 9, (2,) * 9))
    (pop,) = row.timings
    assert (row.batch_size, row.ratio_to_bound, pop.num_same_tokens) == (2, None, None)
    assert (pop.tpot_ms, pop.itl_ms) == (None, None)
    assert pop.ttft_ms.mean == 12
    assert pop.tokens_per_second.median == pytest.approx(2000 / 16)
    assert row.roofline_bound is not None
    assert 0.9 < row.roofline_bound < row.bound
    # SmolLM2's 134 million parameters in fp32 at 10 GB/s; tied, so the LM head reads the embedding's. Norms aside.
    assert row.tpot_bound_ms == pytest.approx(134_515_008 * 4 / 10e9 * 1e3, rel=1e-3)


def test_a_load_counts_from_the_arrival_of_each_request() -> None:
    rounds = [
        BenchReply((), (), 0, token_ms=((10.0, 12.0, 16.0), (30.0, 31.0, 32.0)), wall_ms=50.0),
        BenchReply((), (), 0, token_ms=((20.0, 22.0, 24.0), (20.0, 22.0, 24.0)), wall_ms=100.0),
    ]
    timing = make_load_timing(POP, rounds)
    assert (timing.ttft_ms.mean, timing.latency_ms.mean) == (20, 24)
    assert timing.tpot_ms is not None
    assert timing.itl_ms is not None
    assert sorted([timing.tpot_ms.p10, timing.tpot_ms.p90]) == pytest.approx(np.percentile([3, 1, 2, 2], [10, 90]))
    assert timing.itl_ms.count == 8
    assert timing.tokens_per_second.mean == pytest.approx((6000 / 50 + 6000 / 100) / 2)
    assert timing.requests_per_second.mean == pytest.approx((2000 / 50 + 2000 / 100) / 2)


def test_the_seed_decides_the_prompts() -> None:
    def prompts(seed: int) -> tuple[tuple[int, ...], ...]:
        worker = CannedWorker(*[reply(1.0)] * 2)
        options = parse_options(["pop", "--repeats", "1", "--output-len", "1", "--seed", str(seed)])
        members = [Participant(Entrant(POP, worker), "pop", "fp32", {}, MANIFEST)]
        run = measure(options, MANIFEST, (9,), Participants(members))
        assert run.engines[0].facts is not None
        assert run.engines[0].facts.num_tail_layers == 10
        return worker.requests[0].prompts

    assert prompts(3) == prompts(3) != prompts(4)
    assert len(prompts(3)[0]) == 9


def test_a_run_is_printed_with_those_that_failed() -> None:
    failing = Entrant("peer, int4", CannedWorker(), is_peer=True, failure="no kernel for int4")
    members = [
        Participant(entrant, "peer" if entrant.is_peer else "pop", "fp32", {}, None if entrant.is_peer else MANIFEST)
        for entrant in (*entrants(), failing)
    ]
    options = parse_options(["pop", "--repeats", "2", "--output-len", "3"])
    text = format_run(measure(options, MANIFEST, (512,), Participants(members)))
    lines = text.splitlines()
    assert lines[0].startswith("smollm2-135m, fp32, ort-cpu, 10 tail layers, one-pass, ")
    (peer,) = (line.split() for line in lines if line.startswith("  peer, fp32") and "MB" not in line)
    assert peer[2:] == ["40.0", "40.0-40.0", "40.0", "7.0", "6.2-7.8", "8.0", "55.6", "3.000", "5.000", "0"]
    assert lines[-1] == "not measured: peer, int4: no kernel for int4"


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1001])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    samples = np.random.default_rng(count).gamma(2.0, 5.0, count)
    found = Percentiles.of(samples.tolist())
    expected = np.percentile(samples, [10, 50, 90, 99])
    assert [found.p10, found.median, found.p90, found.p99] == pytest.approx(expected)
    assert found.mean == pytest.approx(samples.mean())
    assert found.count == count


def test_same_tokens_end_at_the_first_that_differs() -> None:
    assert [count_same((1, 2, 3), other) for other in ((1, 2, 3), (1, 9, 3), (9, 2, 3), (1, 2))] == [3, 1, 0, 2]


def test_a_bound_of_nothing_pruned_is_one() -> None:
    options = parse_options(["full", "--repeats", "1", "--output-len", "1"])
    manifest = replace(MANIFEST, plan=PrunePlan(30, 0))
    row = measure_batch(options, manifest, [Entrant(POP, CannedWorker(*[reply(1.0)] * 2))], ((1,) * 9,))
    assert row.bound == 1
