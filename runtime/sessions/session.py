"""What an Engine asks of a target."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.kv_cache import SlotRange


class Session(Protocol):
    """The two graphs, the weights and the cache memory of one target. It keeps no lengths: the caller passes them."""

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], cache_len: int, num_boundary: int
    ) -> NDArray[np.float32]:
        """Run a chunk [rows] of a prompt into a slot; its last `num_boundary` rows go through the tail in full.

        Returns the logits of those rows, [num_boundary, vocab_size].
        """

    def decode(
        self, slots: SlotRange, token_ids: NDArray[np.int64], cache_lens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Run the full model over [slots.count, rows] new tokens; returns logits [slots.count, rows, vocab_size]."""

    def close(self) -> None:
        """Give up weights and cache."""
