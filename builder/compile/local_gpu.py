"""The NVIDIA GPU of this machine, by the driver's own word: a question too small for a package."""

import ctypes

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def local_gpu() -> str | None:
    """The first GPU's compute capability, like `sm89`; None where there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    major, minor = (_attribute(cuda, which, device) for which in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR))
    return f"sm{major}{minor}"


def _attribute(cuda: ctypes.CDLL, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value
