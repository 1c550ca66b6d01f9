"""The process in which one engine is timed: requests come in on stdin and replies go out on stdout, a line each."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pop_engine.configs.errors import exit_with_message
from pop_engine.runtime.engine import Engine
from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.tools.bench_message import BenchReply, BenchRequest


def main(argv: Sequence[str] | None = None) -> int:
    """Load the engine and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench_worker", description="Time one engine for bench.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args(argv)
    return exit_with_message("bench_worker", lambda: serve(arguments.engine, arguments.threads))


def serve(path: Path, threads: int | None) -> int:
    """Answer each request line with a reply line."""
    with Engine.load(path, threads=threads) as engine:
        send(BenchReply((), (), peak_memory_bytes()))
        for line in sys.stdin:
            send(measure(engine, msgspec.json.decode(line, type=BenchRequest)))
    return 0


def measure(engine: Engine, request: BenchRequest) -> BenchReply:
    """Run one request. Slots are taken and given back outside the timed parts."""
    slots = [engine.allocate_slot() for _ in request.prompts]
    ttft_ms, step_ms, tokens = [], [], []
    for slot, prompt in zip(slots, request.prompts, strict=True):
        start = time.perf_counter()
        tokens.append(int(np.argmax(engine.prefill(slot, prompt))))
        ttft_ms.append(_milliseconds_since(start))
    for _ in range(request.num_settling_steps + request.num_decode_steps):
        start = time.perf_counter()
        tokens = np.argmax(engine.decode_step(slots, tokens), axis=-1).tolist()
        step_ms.append(_milliseconds_since(start))
    for slot in slots:
        engine.free_slot(slot)
    return BenchReply(tuple(ttft_ms), tuple(step_ms[request.num_settling_steps :]), peak_memory_bytes())


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1000


def send(reply: BenchReply) -> None:
    """Write a reply line."""
    print(msgspec.json.encode(reply).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
