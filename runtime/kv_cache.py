"""The KV cache: one pool per layer for K and one for V, a row per slot, updated in place."""

import mmap
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.io_contract import CacheShape, past_key, past_value


@dataclass(frozen=True)
class SlotRange:
    """Slots [first, first + count): a contiguous view of every pool."""

    first: int
    count: int

    @property
    def members(self) -> range:
        """The slots."""
        return range(self.first, self.first + self.count)


class KVCachePool:
    """Host memory for all slots, `[num_slots, num_key_value_heads, max_seq_len, head_dim]` per tensor.

    Memory is reserved at once and used page by page as sequences grow: a slot that never held more than 100 tokens
    costs 100 tokens.
    """

    def __init__(self, cache: CacheShape, num_slots: int, dtype: np.dtype[np.generic]) -> None:
        self._pools: dict[str, NDArray[np.generic]] = {}
        for layer_idx, kv in enumerate(cache.layers):
            shape = (num_slots, kv.num_key_value_heads, cache.max_seq_len, kv.head_dim)
            for name in (past_key(layer_idx), past_value(layer_idx)):
                self._pools[name] = _reserve(shape, dtype)

    def view(self, name: str, slots: SlotRange) -> NDArray[np.generic]:
        """One cache tensor's rows for these slots, by the name of the graph input it is bound to."""
        return self._pools[name][slots.first : slots.first + slots.count]


def _reserve(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    try:
        memory = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    except OSError as error:
        raise EngineError(
            f"KV cache: {prod(shape) * dtype.itemsize} bytes for one tensor cannot be reserved ({error.strerror}); "
            "build with a lower --max-seq-len or --max-batch-size"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page would make two megabytes resident for the first token of every head.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class Slots:
    """Which slots are taken, how many tokens each holds, and how far its positions are from their number.

    An image's tokens may share positions, so that the text after them goes on at another one than their count
    (Hugging Face's `rope_deltas`). 0 for text.
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        self.max_seq_len = max_seq_len
        self.lengths = np.zeros(num_slots, np.int64)
        self.rope_deltas = np.zeros(num_slots, np.int64)
        self._taken = [False] * num_slots

    def allocate(self) -> int:
        """Take the lowest free slot, empty. Raises UsageError where all are taken."""
        for slot, taken in enumerate(self._taken):
            if not taken:
                self._taken[slot] = True
                self.lengths[slot] = self.rope_deltas[slot] = 0
                return slot
        raise UsageError(f"slots: all {len(self._taken)} are taken; free one, or build with a higher --max-batch-size")

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self.check(slot)
        self._taken[slot] = False
        self.lengths[slot] = self.rope_deltas[slot] = 0

    def next_position(self, slot: int) -> int:
        """The position of the next token."""
        self.check(slot)
        return int(self.lengths[slot] + self.rope_deltas[slot])

    @property
    def num_free(self) -> int:
        """How many slots can be allocated."""
        return self._taken.count(False)

    def check(self, slot: int) -> None:
        """Raise UsageError unless this slot is taken."""
        if not 0 <= slot < len(self._taken) or not self._taken[slot]:
            raise UsageError(f"slot {slot}: not allocated; expected one that allocate_slot returned")

    def check_room(self, slot: int, num_tokens: int) -> None:
        """Raise UsageError unless this many more tokens fit into the slot."""
        self.check(slot)
        total = int(self.lengths[slot]) + num_tokens
        if total > self.max_seq_len:
            raise UsageError(
                f"sequence of {total} tokens: the engine holds max_seq_len {self.max_seq_len}; "
                "shorten it, or build with a higher --max-seq-len"
            )

    def covering(self, slots: list[int]) -> list[SlotRange]:
        """The fewest contiguous ranges that hold these slots.

        A range may bridge other slots. They get a token written behind their end, where the next real one goes, so
        a full slot cannot be bridged.
        """
        ranges: list[SlotRange] = []
        for slot in sorted(slots):
            last = ranges[-1] if ranges else None
            if last is not None and all(
                self.lengths[between] < self.max_seq_len for between in range(last.first + last.count, slot)
            ):
                ranges[-1] = SlotRange(last.first, slot - last.first + 1)
            else:
                ranges.append(SlotRange(slot, 1))
        return ranges
