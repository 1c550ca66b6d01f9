"""Square images of one size, as Gemma 3 takes them (Hugging Face's Gemma3Processor, pan and scan off)."""

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.vision import FixedSizeRecord, PixelRecord, PlaceholderRecord
from pop_engine.runtime.images.loading import ImageSource, load_image
from pop_engine.runtime.images.pixels import PixelScale
from pop_engine.runtime.images.processor import ImageText, PromptImage, TokenText


class SiglipProcessor:
    """See ImageProcessor. An image keeps no shape: it is squeezed into the square, as the model was trained."""

    def __init__(self, size: FixedSizeRecord, pixels: PixelRecord, placeholders: PlaceholderRecord) -> None:
        self._size = size
        self._scale = PixelScale(pixels)
        self._placeholders = placeholders

    def image(self, source: ImageSource) -> PromptImage:
        """See ImageProcessor."""
        load_image(source)
        side = self._size.image_size
        return PromptImage((source,), side, side, 1, self._size.tokens_per_image)

    def vision_inputs(self, image: PromptImage) -> dict[str, NDArray[np.generic]]:
        """See ImageProcessor."""
        pixels = self._scale.scaled(load_image(image.frames[0]), image.height, image.width)
        return {io.PIXEL_VALUES: pixels[None]}

    def image_text(self, token_text: TokenText) -> ImageText:
        """See ImageProcessor."""
        assert self._placeholders.start is not None
        assert self._placeholders.end is not None
        start, end = token_text(self._placeholders.start), token_text(self._placeholders.end)
        return ImageText(start, token_text(self._placeholders.image), f"\n\n{start}", f"{end}\n\n")
