"""Engines that take turns: one works, the others stand still."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pop_engine.configs.errors import EngineError
from pop_engine.tools.bench_message import BenchReply, BenchRequest
from pop_engine.tools.bench_result import DecodeRow
from pop_engine.tools.spread import Spread


class Worker(Protocol):
    """What times one engine. WorkerProcess is the real one."""

    peak_memory_bytes: int

    def ask(self, request: BenchRequest) -> BenchReply:
        """Run a request and time it."""
        ...


@dataclass
class Entrant:
    """One engine of a run. A peer may fail: it is then out, and `failure` says why."""

    name: str
    worker: Worker
    is_peer: bool = False
    failure: str | None = None

    def ask(self, request: BenchRequest) -> BenchReply | None:
        """A reply, or None where the peer has failed. Raises EngineError where one of ours does."""
        if self.failure is not None:
            return None
        try:
            return self.worker.ask(request)
        except EngineError as error:
            if not self.is_peer:
                raise
            self.failure = str(error)
            return None


def alternate(entrants: Sequence[Entrant], repeats: int, request: BenchRequest, title: str) -> list[list[BenchReply]]:
    """Replies of each entrant to one request, round by round. A first round warms up and is dropped.

    The replies of one that fails are empty.
    """
    replies: list[list[BenchReply]] = [[] for _ in entrants]
    for round_idx in range(repeats + 1):
        for idx in turns(len(entrants), round_idx):
            show_progress(f"{title}, round {round_idx} of {repeats}: {entrants[idx].name}")
            reply = entrants[idx].ask(request)
            if reply is None:
                replies[idx].clear()
            elif round_idx:
                replies[idx].append(reply)
    show_progress("")
    return replies


def turns(num_entrants: int, round_idx: int) -> list[int]:
    """Who works when: each begins in its round, so that a drift of the machine's speed favours none."""
    return [(idx + round_idx + 1) % num_entrants for idx in range(num_entrants)]


@dataclass(frozen=True)
class Contest:
    """Two workers and how often each takes its turn."""

    pop: Worker
    full: Worker
    repeats: int

    def run(self, request: BenchRequest, title: str) -> tuple[list[BenchReply], list[BenchReply]]:
        """Replies of both to the same request."""
        entrants = (Entrant("engine", self.pop), Entrant("baseline", self.full))
        pop, full = alternate(entrants, self.repeats, request, title)
        return pop, full


def measure_decode(contest: Contest, request: BenchRequest) -> DecodeRow:
    """Time of a decode step over all prompts of the request together."""
    replies = contest.run(request, f"decode batch {len(request.prompts)}")
    pop, full = (Spread.of([ms for reply in side for ms in reply.step_ms]) for side in replies)
    return DecodeRow(len(request.prompts), pop, full, full.median / pop.median)


def show_progress(text: str) -> None:
    """Replace the progress line, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
