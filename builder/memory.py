"""How much memory a build takes at its peak, child processes included."""

import threading
import time
from collections.abc import Callable, Sequence

import psutil

_INTERVAL_S = 0.1
# Linux finds what is shared by walking a process's page tables: the larger it is, the longer that takes.
_PAUSE_PER_COST = 19


class PeakMemory:
    """Samples the resident size of this process and its children while it is open; what they share counts once."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        """Resident sizes are read in every sample; what is shared is counted anew with a twentieth of one core."""
        process, shared = psutil.Process(), _Shared()
        while not self._done.wait(_INTERVAL_S):
            members = [process, *process.children(recursive=True)]
            resident = _total(members, lambda member: int(member.memory_info().rss))
            self.peak_bytes = max(self.peak_bytes, resident - shared.num_bytes(members))


class _Shared:
    """The bytes that a sum of resident sizes counts more than once, as they were when they were last counted."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._pids: frozenset[int] = frozenset()
        self._due_at = 0.0

    def num_bytes(self, members: Sequence[psutil.Process]) -> int:
        """Counted again where it is time, and where other processes are there than before."""
        pids = frozenset(member.pid for member in members)
        if pids != self._pids or time.monotonic() >= self._due_at:
            started = time.thread_time()
            self._num_bytes = _total(members, _counted_elsewhere)
            cost = time.thread_time() - started
            self._pids, self._due_at = pids, time.monotonic() + _PAUSE_PER_COST * cost
        return self._num_bytes


def _counted_elsewhere(member: psutil.Process) -> int:
    """What is resident beyond the proportional size, which only Linux tells. Both are read together: sizes change."""
    sizes = member.memory_full_info()
    return int(sizes.rss - getattr(sizes, "pss", sizes.rss))


def _total(members: Sequence[psutil.Process], size: Callable[[psutil.Process], int]) -> int:
    total = 0
    for member in members:
        try:
            total += size(member)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
