"""From an RGB image to normalised numbers."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.vision import PixelRecord

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_CHANNELS = 3
_NUM_LEVELS = 256


class PixelScale:
    """Resizes, rescales and normalises, to the bit as Hugging Face's PIL processors do.

    An 8-bit sample has 256 values, so each channel's numbers are a table.
    """

    def __init__(self, record: PixelRecord) -> None:
        self._resample = record.resample
        levels = (np.arange(_NUM_LEVELS, dtype=np.float64) * record.rescale_factor).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (record.image_mean, record.image_std))
        # [channels, levels]
        self._table = (levels - mean) / std

    def scaled(self, image: "Image", height: int, width: int) -> NDArray[np.float32]:
        """An RGB image as numbers [channels, height, width]."""
        pixels = np.asarray(image.resize((width, height), self._resample))
        scaled: NDArray[np.float32] = np.stack(
            [self._table[channel][pixels[..., channel]] for channel in range(NUM_CHANNELS)]
        )
        return scaled
