"""What the sessions on a GPU share: which calls a chunk of a prompt and a decode step become."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_call import Inputs, call_inputs
from pop_engine.runtime.sessions.session import ImageRows


class DeviceSession(ABC):
    """See Session. What opening it has taken is given back in reverse, also where opening fails on the way."""

    _device: Device
    _vocab_size: int
    _prefill_contract: GraphContract
    _decode_contract: GraphContract

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        with ExitStack() as opened:
            self._open(directory, manifest, opened)
            self._opened = opened.pop_all()

    @abstractmethod
    def _open(self, directory: Path, manifest: Manifest, opened: ExitStack) -> None:
        """Set up all that is declared above and more, and leave on `opened` what must be closed."""

    @abstractmethod
    def _max_rows(self, slots: SlotRange) -> int:
        """New tokens that a decode call takes at once."""

    @abstractmethod
    def _run_prefill(self, slots: SlotRange, inputs: Inputs, *, wants_logits: bool) -> NDArray[np.float32] | None:
        """Run the prefill graph; logits [1, 1, vocab_size] where they are wanted."""

    @abstractmethod
    def _run_decode(self, slots: SlotRange, inputs: Inputs) -> NDArray[np.float32]:
        """Run the decode graph; logits [slots.count, rows, vocab_size]."""

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        cache_len: int,
        num_boundary: int,
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """See Session."""
        assert images is None, "a graph with image inputs is refused when it is loaded"
        cache_lens, slots = np.array([cache_len]), SlotRange(slot, 1)
        if num_boundary == len(token_ids):
            # A chunk without context rows is a decode step: that graph is tuned for it, and not every CUDA kernel
            # takes zero rows.
            return self.decode(slots, token_ids[None], cache_lens).reshape(num_boundary, -1)
        assert num_boundary <= 1, "a build with a wider window in one pass is refused"
        self._device.make_current()
        inputs = call_inputs(self._prefill_contract, token_ids[None], cache_lens, num_boundary)
        logits = self._run_prefill(slots, inputs, wants_logits=num_boundary > 0)
        return np.empty((0, self._vocab_size), np.float32) if logits is None else logits.reshape(num_boundary, -1)

    def decode(
        self,
        slots: SlotRange,
        token_ids: NDArray[np.int64],
        cache_lens: NDArray[np.int64],
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """See Session. More new tokens than the graph takes at once go in several calls."""
        assert images is None, "a graph with image inputs is refused when it is loaded"
        self._device.make_current()
        most = self._max_rows(slots)
        pieces: list[NDArray[np.float32]] = []
        for start in range(0, token_ids.shape[1], most):
            piece = token_ids[:, start : start + most]
            inputs = call_inputs(self._decode_contract, piece, cache_lens + start, num_boundary=1)
            pieces.append(self._run_decode(slots, inputs))
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)

    def close(self) -> None:
        """See Session."""
        self._opened.close()
