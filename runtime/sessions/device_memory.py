"""Memory: blocks of the GPU's, cut into aligned pieces, and pinned blocks of the host's that copies go through."""

import ctypes
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_resource import DeviceResource

# What TensorRT asks of activation memory, and more than any kernel asks of a tensor.
ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    """Bytes that a piece takes with the padding behind it."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def offsets(sizes: Mapping[str, int]) -> dict[str, int]:
    """Where each piece begins when all lie one after another, aligned, in the order given."""
    found: dict[str, int] = {}
    position = 0
    for name, num_bytes in sizes.items():
        found[name] = position
        position += aligned(num_bytes)
    return found


def total_bytes(sizes: Iterable[int]) -> int:
    """Bytes of all pieces with their padding."""
    return sum(aligned(num_bytes) for num_bytes in sizes)


class DeviceBlock(DeviceResource):
    """One allocation on the GPU, at `address`. A context manager."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self.num_bytes = num_bytes
        # The driver refuses an allocation of nothing.
        self._pointer = device.call("cuMemAlloc", max(num_bytes, 1))
        self.address = int(self._pointer)

    def close(self) -> None:
        """Free it."""
        if self._pointer is not None:
            pointer, self._pointer = self._pointer, None
            self._device.call("cuMemFree", pointer)

    def clear(self) -> None:
        """Fill it with zeros, and wait for that."""
        self._device.call("cuMemsetD8", self._pointer, 0, max(self.num_bytes, 1))


class PinnedBlock(DeviceResource):
    """Page-locked host memory, which the GPU reads and writes without the driver's own copy. A context manager."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._pointer = device.call("cuMemHostAlloc", max(num_bytes, 1), 0)
        self.address = int(self._pointer)
        content = (ctypes.c_uint8 * num_bytes).from_address(self.address)
        self.content: NDArray[np.uint8] = np.ctypeslib.as_array(content)

    def close(self) -> None:
        """Free it; nothing may read `content` after that."""
        if self._pointer is not None:
            pointer, self._pointer = self._pointer, None
            self.content = np.empty(0, np.uint8)
            self._device.call("cuMemFreeHost", pointer)
