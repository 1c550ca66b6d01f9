"""A line about the upload on a terminal, and nothing elsewhere."""

import sys
import time

_INTERVAL_S = 0.1


class UploadProgress:
    """Counts bytes up to a total; the line is overwritten as they go, and erased at the end."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._shown_at = 0.0
        self._shows = sys.stderr.isatty()

    def advance(self, num_bytes: int) -> None:
        """So many bytes more."""
        self._done_bytes += num_bytes
        now = time.monotonic()
        if self._shows and now - self._shown_at >= _INTERVAL_S:
            self._shown_at = now
            done, total = self._done_bytes / 1e9, self._total_bytes / 1e9
            print(f"\rweights: {done:.1f} of {total:.1f} GB", end="", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Erase the line."""
        if self._shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
