"""Fixed places for what crosses between host and GPU in a call: token ids and rows go in, logits come out."""

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_memory import DeviceBlock, PinnedBlock, offsets, total_bytes
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.device_types import ITEM_BYTES, as_float32


class CallBuffers:
    """Inputs and logits of a call, on the GPU and, pinned, on the host.

    Addresses never change, so that a captured graph can be launched again with other contents. `input_bytes` are the
    largest sizes that any call brings.
    """

    def __init__(self, device: Device, stream: DeviceStream, input_bytes: Mapping[str, int], logits_bytes: int) -> None:
        self._stream = stream
        self._offsets = offsets(input_bytes)
        num_bytes = total_bytes(input_bytes.values())
        self._inputs = DeviceBlock(device, num_bytes)
        self._host_inputs = PinnedBlock(device, num_bytes)
        self._logits = DeviceBlock(device, logits_bytes)
        self._host_logits = PinnedBlock(device, logits_bytes)

    @property
    def logits_address(self) -> int:
        """Where the GPU writes logits."""
        return self._logits.address

    def address(self, name: str) -> int:
        """Where the GPU reads an input."""
        return self._inputs.address + self._offsets[name]

    def write(self, inputs: Mapping[str, NDArray[np.int64]]) -> None:
        """Put a call's inputs into the pinned memory. The call before it must be over."""
        for name, value in inputs.items():
            begin = self._offsets[name]
            self._host_inputs.content[begin : begin + value.nbytes] = value.view(np.uint8).ravel()

    def upload(self) -> None:
        """Put the copy of all inputs on the stream: one and small, whatever the call's shapes."""
        self._stream.upload(self._inputs.address, self._host_inputs.address, self._inputs.num_bytes)

    def download(self, shape: tuple[int, ...], dtype: str) -> None:
        """Put the copy of logits of this shape on the stream."""
        self._stream.download(self._host_logits.address, self._logits.address, prod(shape) * ITEM_BYTES[dtype])

    def logits(self, shape: tuple[int, ...], dtype: str) -> NDArray[np.float32]:
        """The logits that were downloaded, as fp32, copied. The stream must have been waited for."""
        raw = self._host_logits.content[: prod(shape) * ITEM_BYTES[dtype]]
        return as_float32(raw, dtype).reshape(shape)

    def close(self) -> None:
        """Free all of it."""
        for block in (self._inputs, self._host_inputs, self._logits, self._host_logits):
            block.close()
