"""The process in which one engine is timed: requests come in on stdin and replies go out on stdout, a line each."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pop_engine.configs.errors import exit_with_message
from pop_engine.runtime.engine import Engine
from pop_engine.tools.bench.load import time_load
from pop_engine.tools.bench.subject import Prompts, time_batch
from pop_engine.tools.bench_message import BenchReply, BenchRequest, serve


class EngineSubject:
    """An engine of ours: a prompt is prefilled into a slot, and then the next prompt into another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots: list[int] = []

    def reserve(self, batch_size: int, max_len: int) -> None:
        """Give the slots back and take others."""
        self.close()
        self._slots = [self._engine.allocate_slot() for _ in range(batch_size)]

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """First tokens, one after another."""
        for slot, prompt in zip(self._slots, prompts, strict=True):
            yield int(np.argmax(self._engine.prefill(slot, prompt)))

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """Next tokens, all in one step."""
        found: list[int] = np.argmax(self._engine.decode_step(self._slots, token_ids), axis=-1).tolist()
        return found

    def close(self) -> None:
        """Give the slots back."""
        for slot in self._slots:
            self._engine.free_slot(slot)
        self._slots = []


def main(argv: Sequence[str] | None = None) -> int:
    """Load the engine and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(prog="bench_worker", description="Time one engine for a benchmark.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args(argv)
    return exit_with_message("bench_worker", lambda: _serve(arguments.engine, arguments.threads))


def _serve(path: Path, threads: int | None) -> int:
    with Engine.load(path, threads=threads) as engine:
        serve(lambda request: measure(engine, request))
    return 0


def measure(engine: Engine, request: BenchRequest) -> BenchReply:
    """Run one request: a batch, or a load of requests."""
    if request.concurrency is not None:
        return time_load(engine, request)
    subject = EngineSubject(engine)
    try:
        return time_batch(subject, request)
    finally:
        subject.close()


if __name__ == "__main__":
    sys.exit(main())
