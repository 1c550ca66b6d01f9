"""What an Engine asks of a target."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.kv_cache import SlotRange


@dataclass(frozen=True)
class ImageRows:
    """What a model with images takes beside the tokens [B, S] of one call. What is none is text with plain positions.

    `positions` are [axes, B, S], or [1, B, S] for all axes. `ids` [B, S] number the images from 1 and are 0 at text;
    `embeds` [B, S, hidden_size] and `deepstack` [num_deepstack, B, S, hidden_size] are 0 there.
    """

    positions: NDArray[np.int64] | None
    ids: NDArray[np.int64] | None = None
    embeds: NDArray[np.float32] | None = None
    deepstack: NDArray[np.float32] | None = None


class Session(Protocol):
    """The two graphs, the weights and the cache memory of one target. It keeps no lengths: the caller passes them."""

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        cache_len: int,
        num_boundary: int,
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """Run a chunk [rows] of a prompt into a slot; its last `num_boundary` rows go through the tail in full.

        Returns the logits of those rows, [num_boundary, vocab_size].
        """

    def decode(
        self,
        slots: SlotRange,
        token_ids: NDArray[np.int64],
        cache_lens: NDArray[np.int64],
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """Run the full model over [slots.count, rows] new tokens; returns logits [slots.count, rows, vocab_size]."""

    def close(self) -> None:
        """Give up weights and cache."""
