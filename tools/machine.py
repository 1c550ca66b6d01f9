"""The machine, versions and commit that stand beside every figure."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Where and with what a figure was measured. `num_cores` counts those this process may run on.

    `commit` ends in `-dirty` where the tree had changes, and is None outside a git checkout.
    """

    cpu_model: str
    num_cores: int
    memory_bytes: int
    python_version: str
    numpy_version: str | None
    onnxruntime_version: str | None
    commit: str | None
    date: str


def describe_machine() -> Machine:
    """Ask the operating system, the installed packages and git, without importing what is asked about."""
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        python_version=platform.python_version(),
        numpy_version=_package_version("numpy"),
        onnxruntime_version=_package_version("onnxruntime"),
        commit=LOADED_COMMIT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def find_commit(directory: Path) -> str | None:
    """The checked-out commit of the git repository around a folder, or None."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


# Asked when the code is loaded: by the time that a benchmark ends there may be another.
LOADED_COMMIT = find_commit(Path(__file__).resolve().parent)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
