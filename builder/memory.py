"""How much memory a build takes at its peak, child processes included."""

import threading

import psutil

_INTERVAL_S = 0.1


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
        process = psutil.Process()
        while not self._done.wait(_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(process))


def _resident_bytes(process: psutil.Process) -> int:
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            # The proportional size, which only Linux tells.
            total += getattr(member.memory_full_info(), "pss", member.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
