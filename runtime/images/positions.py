"""Multimodal rotary positions: time, row and column of every token."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.io_contract import NUM_MROPE_AXES
from pop_engine.runtime.images.prompt import PlacedImage


def mrope_positions(num_tokens: int, images: Sequence[PlacedImage], first: int) -> tuple[NDArray[np.int64], int]:
    """Positions [3, num_tokens] of a prompt that begins at position `first`, and the position after its end.

    As Hugging Face's get_rope_index: text counts on in all three axes; an image's tokens share one time and count
    their rows and columns from there; after an image it goes on behind the longer of its sides.
    """
    positions = np.empty((NUM_MROPE_AXES, num_tokens), np.int64)
    place, position = 0, first
    for placed in images:
        num_text = placed.start - place
        positions[:, place : placed.start] = position + np.arange(num_text)
        position += num_text
        image = placed.image
        rows, columns = np.indices((image.rows, image.columns)).reshape(2, -1)
        positions[:, placed.start : placed.stop] = position + np.stack([np.zeros_like(rows), rows, columns])
        position += max(image.rows, image.columns)
        place = placed.stop
    positions[:, place:] = position + np.arange(num_tokens - place)
    return positions, position + num_tokens - place
