"""A GPU in host memory: the calls of NVIDIA's driver that the sessions make, with the driver's rules.

It is strict where a real GPU is silent: work runs only when its stream is waited for, or in a captured graph only
when that is launched; memory begins as NaN; every access must lie in one live allocation.
"""

import ctypes
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

Work = Callable[[], None]
ALIGNMENT = 256


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


OK = (Status.CUDA_SUCCESS,)


class SimulatedGpu:
    """Stands for the module cuda.bindings.driver. `calls` counts them by name."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, capability: tuple[int, int] = (8, 9), total_bytes: int = 1 << 30, count: int = 1) -> None:
        self.calls: Counter[str] = Counter()
        self.uploaded_bytes = 0
        self._capability = capability
        self._total_bytes = total_bytes
        self._count = count
        self._blocks: dict[int, tuple[Any, int]] = {}
        self._pinned: dict[int, tuple[Any, int]] = {}
        self._queue: list[Work] = []
        self._captured: list[Work] | None = None
        self._graphs: dict[int, list[Work]] = {}
        self._contexts = 0

    # What tests ask.

    @property
    def used_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._blocks.values())

    @property
    def is_clean(self) -> bool:
        """Whether everything was freed."""
        return not (self._blocks or self._pinned or self._graphs or self._contexts)

    def put(self, work: Work) -> None:
        """Put work on the stream, as a kernel launch does."""
        (self._queue if self._captured is None else self._captured).append(work)

    def flush(self) -> None:
        """Run what is on the stream."""
        while self._queue:
            self._queue.pop(0)()

    def read(self, address: int, num_bytes: int) -> bytes:
        """What the GPU's memory holds there."""
        self._check(self._blocks, address, num_bytes)
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, content: bytes) -> None:
        """Write to the GPU's memory, as a kernel does."""
        self._check(self._blocks, address, len(content))
        ctypes.memmove(address, content, len(content))

    # The driver.

    def cuInit(self, flags: int) -> Any:  # noqa: N802
        return self._count_call("cuInit", OK)

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return (*OK, self._count)

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return (*OK, ordinal)

    def cuDeviceGetName(self, length: int, device: int) -> Any:  # noqa: N802
        return (*OK, b"Simulated GPU".ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> Any:  # noqa: N802
        return (*OK, self._capability[attribute - 75])

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        self._contexts += 1
        return (*OK, object())

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:  # noqa: N802
        self._contexts -= 1
        return OK

    def cuCtxSetCurrent(self, context: object) -> Any:  # noqa: N802
        return OK

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return (*OK, self._total_bytes - self.used_bytes, self._total_bytes)

    def cuMemAlloc(self, num_bytes: int) -> Any:  # noqa: N802
        if num_bytes > self._total_bytes - self.used_bytes:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY, 0)
        return (*OK, self._allocate(self._blocks, num_bytes))

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        del self._blocks[address]
        return OK

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> Any:  # noqa: N802
        self._check(self._blocks, address, num_bytes)
        ctypes.memset(address, value, num_bytes)
        return OK

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> Any:  # noqa: N802
        return (*OK, self._allocate(self._pinned, num_bytes))

    def cuMemFreeHost(self, address: int) -> Any:  # noqa: N802
        del self._pinned[address]
        return OK

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        assert flags == self.CUstream_flags.CU_STREAM_NON_BLOCKING
        return (*OK, 77)

    def cuStreamDestroy(self, stream: int) -> Any:  # noqa: N802
        return OK

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        assert self._captured is None, "a stream cannot be waited for while it is captured"
        self.flush()
        return self._count_call("cuStreamSynchronize", OK)

    def cuMemcpyHtoDAsync(self, device: int, host: int, num_bytes: int, stream: int) -> Any:  # noqa: N802
        self._check(self._blocks, device, num_bytes)
        self._check(self._pinned, host, num_bytes)
        self.uploaded_bytes += num_bytes
        self.put(lambda: self._copy(device, host, num_bytes))
        return OK

    def cuMemcpyDtoHAsync(self, host: int, device: int, num_bytes: int, stream: int) -> Any:  # noqa: N802
        self._check(self._blocks, device, num_bytes)
        self._check(self._pinned, host, num_bytes)
        self.put(lambda: self._copy(host, device, num_bytes))
        return OK

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Any:  # noqa: N802
        assert not self._queue, "what is on the stream would not be captured"
        self._captured = []
        return self._count_call("cuStreamBeginCapture", OK)

    def cuStreamEndCapture(self, stream: int) -> Any:  # noqa: N802
        captured, self._captured = self._captured, None
        return (*OK, captured)

    def cuGraphInstantiate(self, graph: list[Work], flags: int) -> Any:  # noqa: N802
        key = len(self._graphs) + 1
        self._graphs[key] = list(graph)
        return (*OK, key)

    def cuGraphDestroy(self, graph: list[Work]) -> Any:  # noqa: N802
        graph.clear()
        return OK

    def cuGraphLaunch(self, executable: int, stream: int) -> Any:  # noqa: N802
        for work in self._graphs[executable]:
            self.put(work)
        return self._count_call("cuGraphLaunch", OK)

    def cuGraphExecDestroy(self, executable: int) -> Any:  # noqa: N802
        del self._graphs[executable]
        return OK

    def _count_call(self, name: str, result: Any) -> Any:
        self.calls[name] += 1
        return result

    @staticmethod
    def _copy(to: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(to, source, num_bytes)

    @staticmethod
    def _allocate(blocks: dict[int, tuple[Any, int]], num_bytes: int) -> int:
        raw = ctypes.create_string_buffer(b"\xff" * (num_bytes + ALIGNMENT), num_bytes + ALIGNMENT)
        address = -(-ctypes.addressof(raw) // ALIGNMENT) * ALIGNMENT
        blocks[address] = (raw, num_bytes)
        return address

    @staticmethod
    def _check(blocks: dict[int, tuple[Any, int]], address: int, num_bytes: int) -> None:
        inside = any(start <= address and address + num_bytes <= start + size for start, (_, size) in blocks.items())
        assert inside, f"{num_bytes} bytes at {address:#x} are not in one allocation"
