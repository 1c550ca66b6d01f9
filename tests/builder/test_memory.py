"""The watch over a build's memory: what a child takes counts, and what it shares counts once."""

import multiprocessing
import time
from multiprocessing.connection import Connection

from pop_engine.builder.memory import PeakMemory

NUM_BYTES = 150_000_000
SLACK = 50_000_000


def hold(pipe: Connection, num_bytes: int) -> None:
    """Keep so many bytes until told to end."""
    held = bytearray(b"x") * num_bytes
    pipe.send(len(held))
    pipe.recv()


def peak_with_child(held_before: int, held_by_child: int) -> int:
    """The peak while a forked child lives that shares `held_before` and holds something of its own."""
    shared = bytearray(b"x") * held_before
    context = multiprocessing.get_context("fork")
    with PeakMemory() as before:
        time.sleep(0.5)
    pipe, of_child = context.Pipe()
    child = context.Process(target=hold, args=(of_child, held_by_child))
    with PeakMemory() as memory:
        child.start()
        pipe.recv()
        time.sleep(0.5)
        pipe.send(None)
        child.join()
    assert len(shared) == held_before
    return memory.peak_bytes - before.peak_bytes


def test_a_child_counts() -> None:
    assert NUM_BYTES < peak_with_child(0, NUM_BYTES) < NUM_BYTES + SLACK


def test_what_is_shared_counts_once() -> None:
    assert peak_with_child(NUM_BYTES, 0) < SLACK
