"""The stream that all work is put on, in order, and the CUDA graphs captured from it."""

from collections.abc import Callable

from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_resource import DeviceResource


class DeviceGraph:
    """Work that was captured once and is launched as one."""

    def __init__(self, device: Device, graph: object, stream: object) -> None:
        self._device = device
        self._stream = stream
        try:
            self._executable = device.call("cuGraphInstantiate", graph, 0)
        finally:
            device.call("cuGraphDestroy", graph)

    def launch(self) -> None:
        """Put the work on the stream, with the addresses that it was captured with."""
        self._device.call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free it."""
        if self._executable is not None:
            executable, self._executable = self._executable, None
            self._device.call("cuGraphExecDestroy", executable)


class DeviceStream(DeviceResource):
    """One stream; `handle` is what TensorRT and ONNX Runtime take. A context manager."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Non-blocking: not tied to the default stream, which must not be captured.
        flags = device.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = device.call("cuStreamCreate", flags)
        self.handle = int(self._stream)

    def close(self) -> None:
        """Destroy it."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._device.call("cuStreamDestroy", stream)

    def upload(self, device_address: int, host_address: int, num_bytes: int) -> None:
        """Copy to the GPU. Pinned memory must stay as it is until the stream is waited for."""
        if num_bytes:
            self._device.call("cuMemcpyHtoDAsync", device_address, host_address, num_bytes, self._stream)

    def download(self, host_address: int, device_address: int, num_bytes: int) -> None:
        """Copy from the GPU; the bytes are there once the stream is waited for."""
        if num_bytes:
            self._device.call("cuMemcpyDtoHAsync", host_address, device_address, num_bytes, self._stream)

    def wait(self) -> None:
        """Wait for all work on the stream."""
        self._device.call("cuStreamSynchronize", self._stream)

    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Run `work`, which puts work on this stream, without running what it puts there: it becomes a graph."""
        mode = self._device.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._device.call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        finally:
            # Also after a failure: a stream left in capture takes no other work.
            graph = self._device.call("cuStreamEndCapture", self._stream)
        return DeviceGraph(self._device, graph, self._stream)
