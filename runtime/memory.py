"""How much memory this process has taken."""

import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    # On Linux not from getrusage: its ru_maxrss survives exec, so a small child would report its parent's peak.
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
