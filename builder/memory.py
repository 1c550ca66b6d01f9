"""How much memory a build takes at its peak, child processes included."""

import threading
import time

import psutil

_INTERVAL_S = 0.1
# Linux counts shared pages by walking a process's page tables, which takes as long as the process is large.
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
        """Sample until done, with a twentieth of one core."""
        process, pause = psutil.Process(), _INTERVAL_S
        while not self._done.wait(pause):
            started = time.thread_time()
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(process))
            pause = max(_INTERVAL_S, _PAUSE_PER_COST * (time.thread_time() - started))


def _resident_bytes(process: psutil.Process) -> int:
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            sizes = member.memory_full_info()
            # The proportional size, which only Linux tells.
            total += getattr(sizes, "pss", sizes.rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
