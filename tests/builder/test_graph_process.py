"""The process that one graph is built in."""

from types import SimpleNamespace
from typing import Any

import pytest

from pop_engine.builder.graph_process import GraphProcess, interrupts_held


def test_a_process_that_is_done_ends_by_itself() -> None:
    """Killed, it would leave what its libraries hold of the system, a semaphore of tqdm's, and Python says so."""
    no_job: Any = SimpleNamespace(spec=SimpleNamespace(phase="prefill"))
    with interrupts_held():
        process = GraphProcess(no_job)
    try:
        with pytest.raises(AttributeError, match="has no attribute"):
            process.receive()
        assert process._process.exitcode == 0
    finally:
        process.end()
