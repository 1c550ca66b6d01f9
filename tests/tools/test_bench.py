"""bench with workers that answer canned timings, and the handling of real worker processes."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import CacheShape, GraphContract, KVShape
from pop_engine.configs.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    BuildRecord,
    Limits,
    Manifest,
    ModelSource,
    TargetRecord,
    VerificationRecord,
)
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools import bench as bench_module
from pop_engine.tools.bench import Contest, main, measure
from pop_engine.tools.bench_message import BenchReply, BenchRequest
from pop_engine.tools.bench_options import check_pair, parse_options
from pop_engine.tools.bench_result import BenchResult, format_result
from pop_engine.tools.bound import ttft_bound
from pop_engine.tools.spread import Spread
from pop_engine.tools.worker_process import WorkerProcess

GRAPH = GraphRecord("graph.onnx", GraphContract((), ()), {})
POP = Manifest(
    format_version=FORMAT_VERSION,
    source=ModelSource("smollm2-135m", "/models/smollm2"),
    dims=ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192),
    plan=PrunePlan(30, 10),
    boundary="one-pass",
    dtype="fp32",
    target=TargetRecord("ort-cpu", {"onnxruntime": "1.32.0"}, "prefill"),
    limits=Limits(2048, 8, 512),
    cache=CacheShape((KVShape(3, 64),) * 30, 2048, "float32"),
    prefill=GRAPH,
    decode=GRAPH,
    weights=None,
    tokenizer=None,
    verification=VerificationRecord("skipped"),
    build=BuildRecord({}, 0, "0.1.0"),
    files=(),
)
FULL = replace(POP, plan=PrunePlan(30, 0))
ARGUMENTS = ["pop", "--against", "full"]

# Answers the worker protocol without an engine: 1.5 ms a prompt, 0.5 ms a step; a prompt [0] ends the process.
FAKE_WORKER = """
import json, sys
def reply(ttft, steps): print(json.dumps({"ttft_ms": ttft, "step_ms": steps, "peak_memory_bytes": 7}), flush=True)
reply([], [])
for line in sys.stdin:
    request = json.loads(line)
    if request["prompts"] == [[0]]:
        sys.exit(3)
    reply([1.5] * len(request["prompts"]), [0.5] * request["num_decode_steps"])
"""


@dataclass
class CannedWorker:
    """Answers one duration after another, and notes who was asked what."""

    name: str
    log: list[tuple[str, BenchRequest]]
    durations: Iterator[float]
    peak_memory_bytes: int = field(default=600_000_000)

    def ask(self, request: BenchRequest) -> BenchReply:
        self.log.append((self.name, request))
        duration = next(self.durations)
        return BenchReply((duration,) * len(request.prompts), (duration,) * request.num_decode_steps, 0)


def canned_contest(pop: Sequence[float], full: Sequence[float], repeats: int) -> Contest:
    log: list[tuple[str, BenchRequest]] = []
    return Contest(CannedWorker("pop", log, iter(pop)), CannedWorker("full", log, iter(full)), repeats)


def run_canned(*arguments: str) -> BenchResult:
    """Three rounds of one length and one batch; the rounds that warm up are slow by far."""
    options = parse_options([*ARGUMENTS, "--input-len", "512", "--decode-batch", "4", "--repeats", "3", *arguments])
    pop, full = [999.0, 12.0, 10.0, 11.0], [999.0, 15.0, 14.0, 19.0]
    return measure(options, POP, FULL, canned_contest(pop * 2, full * 2, 3))


def test_rows_are_computed_from_canned_timings() -> None:
    result = run_canned()
    (ttft,), (decode,) = result.ttft, result.decode
    assert (ttft.input_len, ttft.pop.median, ttft.full.median, ttft.pop.count) == (512, 11.0, 15.0, 3)
    assert ttft.ratio == pytest.approx(15 / 11)
    assert ttft.bound == ttft_bound(POP.dims, POP.plan, 512)
    assert ttft.ratio_to_bound == pytest.approx(15 / 11 / ttft.bound)
    assert ttft.roofline_bound is None
    assert (decode.batch_size, decode.pop.median, decode.pop.count) == (4, 11.0, 3 * 16)
    assert (result.pop.num_tail_layers, result.full.num_tail_layers) == (10, 0)
    assert result.pop.peak_memory_bytes == 600_000_000


def test_roofline_bound_stands_beside_where_rates_are_given() -> None:
    (row,) = run_canned("--gflops", "100", "--gbytes", "10").ttft
    assert row.roofline_bound is not None
    assert 1 < row.roofline_bound < row.bound


def test_result_goes_through_json_and_into_tables() -> None:
    result = run_canned()
    content = msgspec.json.encode(result)
    assert msgspec.json.decode(content, type=BenchResult) == result
    assert json.loads(content)["ttft"][0]["pop"] == {"median": 11.0, "min": 10.0, "p10": 10.2, "p90": 11.8, "count": 3}
    lines = format_result(result).splitlines()
    assert lines[0] == "smollm2-135m, fp32, ort-cpu, 10 tail layers, one-pass, default threads"
    assert [line.split() for line in lines if line.split()[:1] == ["512"]] == [
        ["512", "11.0", "10.2-11.8", "15.0", "14.2-18.2", "1.364", "1.456", "0.936", "-"]
    ]
    assert lines[-1] == "peak memory: POP 600 MB, full 600 MB"


def test_the_two_take_turns_on_the_same_prompts() -> None:
    contest = canned_contest([1.0] * 4, [2.0] * 4, 3)
    options = parse_options([*ARGUMENTS, "--input-len", "5", "--decode-batch", "", "--repeats", "3"])
    measure(options, POP, FULL, contest)
    assert isinstance(contest.pop, CannedWorker)
    names, requests = zip(*contest.pop.log, strict=True)
    assert names == ("full", "pop", "pop", "full", "full", "pop", "pop", "full")
    assert len(set(requests)) == 1
    assert len(requests[0].prompts[0]) == 5


def test_the_seed_decides_the_prompts() -> None:
    def prompts(seed: int) -> tuple[tuple[int, ...], ...]:
        contest = canned_contest([1.0] * 2, [1.0] * 2, 1)
        options = parse_options(
            [*ARGUMENTS, "--input-len", "9", "--decode-batch", "", "--repeats", "1", "--seed", str(seed)]
        )
        measure(options, POP, FULL, contest)
        assert isinstance(contest.pop, CannedWorker)
        return contest.pop.log[0][1].prompts

    assert prompts(3) == prompts(3) != prompts(4)


@pytest.mark.parametrize(
    ("samples", "spread"),
    [
        ([5.0], Spread(5.0, 5.0, 5.0, 5.0, 1)),
        ([float(sample) for sample in range(10, -1, -1)], Spread(5.0, 0.0, 1.0, 9.0, 11)),
        ([1.0, 2.0], Spread(1.5, 1.0, 1.1, 1.9, 2)),
    ],
)
def test_spread(samples: list[float], spread: Spread) -> None:
    found = Spread.of(samples)
    assert msgspec.to_builtins(found) == pytest.approx(msgspec.to_builtins(spread))


@pytest.mark.parametrize(
    "arguments",
    [
        ["pop"],
        [*ARGUMENTS, "--input-len", "32,x"],
        [*ARGUMENTS, "--input-len", "0"],
        [*ARGUMENTS, "--repeats", "0"],
        [*ARGUMENTS, "--gflops", "100"],
    ],
)
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert "bench: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "full", "message"),
    [
        ([], POP, "has 10 tail layers; expected a full engine, built with --tail-layers 0"),
        ([], replace(FULL, dims=replace(POP.dims, vocab_size=7)), "dimensions"),
        ([], replace(FULL, limits=Limits(4096, 8, 512)), "max_seq_len 4096, but pop has 2048"),
        (["--input-len", "2049"], FULL, "--input-len 2049: pop holds 2048 tokens"),
        (["--decode-batch", "9"], FULL, "--decode-batch 9: pop holds 8 sequences"),
        (["--decode-context", "2040"], FULL, "--decode-context 2040"),
        (["--json", "/no/such/folder/out.json"], FULL, "--json /no/such/folder/out.json"),
    ],
)
def test_engines_that_are_no_pair(arguments: list[str], full: Manifest, message: str) -> None:
    with pytest.raises(UsageError, match=r"^--") as caught:
        check_pair(parse_options([*ARGUMENTS, *arguments]), POP, full)
    assert message in str(caught.value)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_stands_still_unless_asked() -> None:
    with WorkerProcess([sys.executable, "-c", FAKE_WORKER], "engine") as worker:
        pid = worker._process.pid
        assert process_state(pid) == "T"
        for _ in range(3):
            reply = worker.ask(BenchRequest(((1, 2), (3, 4)), 2))
            assert reply == BenchReply((1.5, 1.5), (0.5, 0.5), 7)
            assert process_state(pid) == "T"
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_ends_is_an_error() -> None:
    with pytest.raises(EngineError, match="engine: its worker ended with exit code 1"):
        WorkerProcess([sys.executable, "-c", "raise SystemExit(1)"], "engine")
    with (
        WorkerProcess([sys.executable, "-c", FAKE_WORKER], "engine") as worker,
        pytest.raises(EngineError, match="engine: its worker ended with exit code 3"),
    ):
        worker.ask(BenchRequest(((0,),)))


def test_the_command_writes_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, manifest in (("pop", POP), ("full", FULL)):
        (tmp_path / name).mkdir()
        manifest.save(tmp_path / name / MANIFEST_NAME)
    monkeypatch.setattr(
        bench_module,
        "start_worker",
        lambda path, options: WorkerProcess([sys.executable, "-c", FAKE_WORKER], str(path)),
    )
    out = tmp_path / "out.json"
    code = main([str(tmp_path / "pop"), "--against", str(tmp_path / "full"), "--input-len", "8,16", "--json", str(out)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    result = msgspec.json.decode(out.read_bytes(), type=BenchResult)
    assert [row.input_len for row in result.ttft] == [8, 16]
    assert [row.batch_size for row in result.decode] == [1, 4, 8]
    assert [row.ratio for row in result.ttft] == [1.0, 1.0]
    assert "time to first token" in captured.out
