"""The watch over a build's memory: what a child takes counts, and what it shares counts once."""

import subprocess
import sys

NUM_BYTES = 150_000_000
SLACK = 50_000_000

# In a process of its own: this one's other children, and what its libraries hold, come and go.
WATCHED = """
import multiprocessing, sys, time
from pop_engine.builder.memory import PeakMemory

def hold(pipe, num_bytes):
    held = bytearray(b"x") * num_bytes
    pipe.send(len(held))
    pipe.recv()

held_before, held_by_child = map(int, sys.argv[1:])
shared = bytearray(b"x") * held_before
with PeakMemory() as before:
    time.sleep(0.5)
context = multiprocessing.get_context("fork")
pipe, of_child = context.Pipe()
child = context.Process(target=hold, args=(of_child, held_by_child))
with PeakMemory() as memory:
    child.start()
    pipe.recv()
    time.sleep(0.5)
    pipe.send(None)
    child.join()
print(memory.peak_bytes - before.peak_bytes)
"""


def growth(held_before: int, held_by_child: int) -> int:
    """By how much the peak grows while a forked child lives that shares some bytes and holds others of its own."""
    command = [sys.executable, "-c", WATCHED, str(held_before), str(held_by_child)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_child_counts() -> None:
    assert NUM_BYTES < growth(0, NUM_BYTES) < NUM_BYTES + SLACK


def test_what_is_shared_counts_once() -> None:
    assert growth(NUM_BYTES, 0) < SLACK
