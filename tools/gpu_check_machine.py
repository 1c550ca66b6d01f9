"""Which GPU, driver and packages a check ran with."""

import ctypes
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from pop_engine.tools.machine import LOADED_COMMIT

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx-cu13",
    "cuda-bindings",
    "pop-engine",
)


@dataclass(frozen=True)
class CheckedMachine:
    """Where a check ran. `driver` is the newest CUDA version that the driver knows, and its own where it says so."""

    device: str
    compute_capability: str | None
    memory_bytes: int | None
    driver: str | None
    python_version: str
    versions: dict[str, str]
    commit: str | None
    date: str


def describe_checked_machine(device: str) -> CheckedMachine:
    """Ask torch, where it is there, the driver and the installed packages."""
    name, capability, memory = _describe_device(device)
    return CheckedMachine(
        device=name,
        compute_capability=capability,
        memory_bytes=memory,
        driver=_driver(),
        python_version=platform.python_version(),
        versions={package: version for package in _PACKAGES if (version := _version(package)) is not None},
        commit=LOADED_COMMIT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def missing_gpu() -> str | None:
    """Why CUDA cannot be used here, in the driver's words; None where it can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"no NVIDIA driver ({error})"
    code = cuda.cuInit(0)
    return None if code == 0 else f"the NVIDIA driver refuses (cuInit gives {code})"


def _describe_device(device: str) -> tuple[str, str | None, int | None]:
    if device == "cpu":
        return platform.processor() or platform.machine(), None, None
    import torch

    found = torch.cuda.get_device_properties(device)
    return found.name, f"sm{found.major}{found.minor}", int(found.total_memory)


def _driver() -> str | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    cuda_version = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    try:
        own = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return cuda_version
    return f"{cuda_version}, {own.partition(':')[2].strip()}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
