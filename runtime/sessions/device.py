"""The NVIDIA GPU of this machine: its driver, what it is, and the context that its memory and streams live in."""

import importlib
from typing import Any

from pop_engine.configs.errors import EngineError
from pop_engine.runtime.sessions.device_resource import DeviceResource

# cuda.bindings.driver has no type information, so what it returns is Any throughout the sessions.
Driver = Any

_MAX_NAME_BYTES = 256
_OUT_OF_MEMORY = 2


def load_driver() -> Driver:
    """The driver's bindings. Raises EngineError where the package is missing; the driver itself loads with a Device."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ModuleNotFoundError as error:
        raise EngineError(
            f"the package cuda-bindings is not installed ({error.name} is missing); "
            "`pip install 'cuda-bindings>=13,<14'`"
        ) from error


class Device(DeviceResource):
    """GPU 0 with its primary context, current on this thread. A context manager; closing it frees what is left in it.

    Raises EngineError where there is no driver or no GPU.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:
            raise EngineError(
                "no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver, or run the engine on a machine "
                "with an NVIDIA GPU"
            ) from error
        if self.call("cuDeviceGetCount") == 0:
            raise EngineError("no NVIDIA GPU: the driver finds none; run the engine on a machine with one")
        self._ordinal = self.call("cuDeviceGet", 0)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._ordinal)
        self.make_current()

    def close(self) -> None:
        """Give the context back."""
        if self._context is not None:
            self._context = None
            self.call("cuDevicePrimaryCtxRelease", self._ordinal)

    def make_current(self) -> None:
        """Make the context this thread's: a caller may have come on another one than the last."""
        self.call("cuCtxSetCurrent", self._context)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call the driver; returns what it gives beside the status. Raises EngineError that names call and status."""
        status, *values = getattr(self.driver, function)(*arguments)
        if int(status) == _OUT_OF_MEMORY:
            raise EngineError(
                f"{function}: the GPU is out of memory; close what else uses it, or build with a lower "
                "--max-batch-size or --max-seq-len"
            )
        if int(status) != 0:
            name = getattr(status, "name", status)
            raise EngineError(f"{function}: the NVIDIA driver refuses it ({name}); see nvidia-smi and the kernel's log")
        return values[0] if len(values) == 1 else tuple(values)

    @property
    def name(self) -> str:
        """The GPU's name, as the driver spells it."""
        raw: bytes = self.call("cuDeviceGetName", _MAX_NAME_BYTES, self._ordinal)
        return raw.split(b"\0", 1)[0].decode(errors="replace").strip()

    @property
    def capability(self) -> str:
        """The compute capability, like `sm89`."""
        names = self.driver.CUdevice_attribute
        wanted = (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self.call("cuDeviceGetAttribute", attribute, self._ordinal) for attribute in wanted)
        return f"sm{major}{minor}"

    def free_bytes(self) -> int:
        """Free memory of the GPU, other processes' use taken off."""
        free, _ = self.call("cuMemGetInfo")
        return int(free)


def open_device(what: str) -> Device:
    """The GPU of this machine. Raises EngineError that names `what` needs it, and says what is missing."""
    try:
        return Device(load_driver())
    except EngineError as error:
        raise EngineError(f"{what}: {error}") from error
