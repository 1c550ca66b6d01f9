"""The one copy of the weights on the GPU, read straight from the mapped checkpoint."""

from collections.abc import Mapping

from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_memory import DeviceBlock, PinnedBlock, offsets, total_bytes
from pop_engine.runtime.sessions.device_progress import UploadProgress
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.weights import MappedTensor

# Two halves: the disk fills one while the GPU reads the other.
STAGING_BYTES = 64 << 20


class DeviceWeights:
    """Every weight in one block, uploaded when it is made; `address` says where each lies."""

    def __init__(
        self,
        device: Device,
        stream: DeviceStream,
        tensors: Mapping[str, MappedTensor],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        sizes = {name: tensor.content.nbytes for name, tensor in tensors.items()}
        self._offsets = offsets(sizes)
        self._block = DeviceBlock(device, total_bytes(sizes.values()))
        try:
            with PinnedBlock(device, staging_bytes) as staging:
                self._upload(stream, staging, tensors, UploadProgress(sum(sizes.values())))
        except BaseException:
            self._block.close()
            raise

    def address(self, name: str) -> int:
        """Where a weight lies on the GPU."""
        return self._block.address + self._offsets[name]

    def close(self) -> None:
        """Free them."""
        self._block.close()

    def _upload(
        self, stream: DeviceStream, staging: PinnedBlock, tensors: Mapping[str, MappedTensor], progress: UploadProgress
    ) -> None:
        half_bytes = len(staging.content) // 2
        half = 0
        try:
            for name, tensor in tensors.items():
                for start in range(0, tensor.content.nbytes, half_bytes):
                    piece = tensor.content[start : start + half_bytes]
                    begin = half * half_bytes
                    staging.content[begin : begin + piece.nbytes] = piece
                    # The copy before this one came from the other half, which is filled next.
                    stream.wait()
                    stream.upload(self.address(name) + start, staging.address + begin, piece.nbytes)
                    progress.advance(piece.nbytes)
                    half = 1 - half
            stream.wait()
        finally:
            progress.finish()
