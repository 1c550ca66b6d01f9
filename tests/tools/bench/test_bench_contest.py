"""Engines that take turns, and the handling of real worker processes."""

import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from bench_kit import CannedWorker
from pop_engine.configs.errors import EngineError
from pop_engine.tools.bench.contest import Contest, Entrant, alternate, measure_decode, turns
from pop_engine.tools.bench_message import BenchReply, BenchRequest
from pop_engine.tools.worker_process import WorkerProcess

REQUEST = BenchRequest(((1, 2), (3, 4)), 2)

# Answers the worker protocol without an engine: 1.5 ms a prompt, 0.5 ms a step; a prompt [0] ends the process.
FAKE_WORKER = """
import json, sys
def reply(ttft, steps): print(json.dumps({"ttft_ms": ttft, "step_ms": steps, "peak_memory_bytes": 7}), flush=True)
reply([], [])
for line in sys.stdin:
    request = json.loads(line)
    if request["prompts"] == [[0]]:
        print("loading", "ValueError: no such token", sep="\\n", file=sys.stderr)
        sys.exit(3)
    reply([1.5] * len(request["prompts"]), [0.5] * request["num_decode_steps"])
"""


def reply(ms: float) -> BenchReply:
    return BenchReply((ms, ms), (ms, ms), 0)


def test_each_begins_in_its_round() -> None:
    assert [turns(3, round_idx) for round_idx in range(4)] == [[1, 2, 0], [2, 0, 1], [0, 1, 2], [1, 2, 0]]


def test_all_take_turns_on_one_request_and_the_first_round_is_dropped() -> None:
    log: list[str] = []
    workers = [CannedWorker(*map(reply, (9.0, 1.0, 2.0)), log=log, name=name) for name in ("pop", "full")]
    found = alternate([Entrant(worker.name, worker) for worker in workers], 2, REQUEST, "two tokens")
    assert found == [[reply(1.0), reply(2.0)]] * 2
    assert log == ["full", "pop", "pop", "full", "full", "pop"]
    assert all(worker.requests == [REQUEST] * 3 for worker in workers)


def test_a_peer_that_fails_is_out_and_one_of_ours_is_an_error() -> None:
    failing = CannedWorker(reply(1.0), reply(2.0), name="peer")
    pop, peer = Entrant("pop", CannedWorker(*[reply(1.0)] * 4, name="pop")), Entrant("peer", failing, is_peer=True)
    found = alternate([pop, peer], 3, REQUEST, "")
    assert [len(replies) for replies in found] == [3, 0]
    assert peer.failure == "peer: has no reply left"
    assert len(failing.requests) == 3
    with pytest.raises(EngineError, match="pop: has no reply left"):
        alternate([pop, peer], 3, REQUEST, "")


def test_decode_of_two_is_compared_by_their_medians() -> None:
    engine = CannedWorker(*map(reply, (9.0, 1.0, 2.0, 3.0)))
    contest = Contest(engine, CannedWorker(*map(reply, (9.0, 3.0, 3.0, 3.0))), 3)
    row = measure_decode(contest, REQUEST)
    assert (row.batch_size, row.pop.median, row.full.median, row.pop.count, row.ratio) == (2, 2.0, 3.0, 6, 1.5)


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_stands_still_unless_asked() -> None:
    with WorkerProcess([sys.executable, "-c", FAKE_WORKER], "engine") as worker:
        pid = worker._process.pid
        assert process_state(pid) == "T"
        for _ in range(3):
            assert worker.ask(REQUEST) == BenchReply((1.5, 1.5), (0.5, 0.5), 7)
            assert process_state(pid) == "T"
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_ends_is_an_error() -> None:
    with pytest.raises(EngineError, match="engine: its worker ended with exit code 1; its own message is above"):
        WorkerProcess([sys.executable, "-c", "raise SystemExit(1)"], "engine")
    with (
        TemporaryFile() as said,
        WorkerProcess([sys.executable, "-c", FAKE_WORKER], "peer", stderr=said) as worker,
        pytest.raises(EngineError) as caught,
    ):
        worker.ask(BenchRequest(((0,),)))
    assert str(caught.value) == "peer: its worker ended with exit code 3 (ValueError: no such token)"
