"""All tensors on the GPU that an engine's graphs share: weights, cache, and what crosses in a call."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pop_engine.configs import io_contract as io
from pop_engine.configs.io_contract import Binding, GraphContract
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_buffers import CallBuffers
from pop_engine.runtime.sessions.device_cache import DeviceCache
from pop_engine.runtime.sessions.device_call import logits_binding, shape_of, small_inputs
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.device_types import ITEM_BYTES
from pop_engine.runtime.sessions.device_weights import DeviceWeights
from pop_engine.runtime.weights import mapped_weights


@dataclass(frozen=True)
class CallSpace:
    """One graph's bindings, and the largest size that each dynamic dimension has in any of its calls."""

    contract: GraphContract
    largest: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Most rows of a call, over all its sequences."""
        return self.largest.get(io.BATCH, 1) * self.largest.get(io.SEQ, 1)

    def input_bytes(self) -> dict[str, int]:
        """Largest size of each input that a call brings."""
        bindings = small_inputs(self.contract)
        return {b.name: prod(shape_of(b, self.largest)) * ITEM_BYTES[b.dtype] for b in bindings}

    def logits_bytes(self) -> int:
        """Largest size of a call's logits."""
        logits = logits_binding(self.contract)
        return 0 if logits is None else prod(shape_of(logits, self.largest)) * ITEM_BYTES[logits.dtype]


class DeviceTensors:
    """Allocates everything, and uploads the weights once, when it is made; `address` says where each binding lies."""

    def __init__(
        self, device: Device, stream: DeviceStream, directory: Path, manifest: Manifest, spaces: Sequence[CallSpace]
    ) -> None:
        weights = {binding.name: binding for space in spaces for binding in space.contract.weights}
        mapped = mapped_weights(directory, manifest, weights.values())
        sizes: dict[str, int] = {}
        for space in spaces:
            sizes |= {name: max(size, sizes.get(name, 0)) for name, size in space.input_bytes().items()}
        self._weight_names = frozenset(mapped)
        with ExitStack() as opened:
            # The weights last: where memory is short, that shows before gigabytes are read.
            self._cache = DeviceCache(device, manifest.cache, manifest.limits.max_batch_size)
            opened.callback(self._cache.close)
            self.buffers = CallBuffers(device, stream, sizes, max(space.logits_bytes() for space in spaces))
            opened.callback(self.buffers.close)
            self._weights = DeviceWeights(device, stream, mapped)
            opened.callback(self._weights.close)
            self._opened = opened.pop_all()

    def address(self, binding: Binding, slots: SlotRange) -> int:
        """Where a binding of either graph lies in a call over these slots. An output lies where its alias does."""
        if binding.name in self._weight_names:
            return self._weights.address(binding.name)
        if binding.name == io.LOGITS:
            return self.buffers.logits_address
        cache = binding.alias or binding.name
        return self._cache.address(cache, slots) if cache in self._cache else self.buffers.address(binding.name)

    def close(self) -> None:
        """Free all of it."""
        self._opened.close()
