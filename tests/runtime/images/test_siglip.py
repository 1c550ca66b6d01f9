"""Gemma 3's images and their text against transformers' processor."""

import io

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from pop_engine.configs.io_contract import PIXEL_VALUES
from pop_engine.configs.vision import FixedSizeRecord, PixelRecord, PlaceholderRecord
from pop_engine.runtime.images.siglip import SiglipProcessor

PIXELS = PixelRecord(2, 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("size", [(1, 1), (56, 56), (37, 91), (300, 40)])
def test_pixels_equal_transformers(size: tuple[int, int]) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    ours = SiglipProcessor(FixedSizeRecord(56, 16), PIXELS, PlaceholderRecord(7, 8, 9))
    found = ours.image(buffer.getvalue())
    expected = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})(images=image, return_tensors="np")
    assert np.array_equal(ours.vision_inputs(found)[PIXEL_VALUES], expected["pixel_values"])
    assert found.num_tokens == 16


def test_an_image_in_the_text_is_enclosed_as_gemma_was_trained() -> None:
    """Gemma3Processor.full_image_sequence, word for word."""
    names = {7: "<image_soft_token>", 8: "<start_of_image>", 9: "<end_of_image>"}
    text = SiglipProcessor(FixedSizeRecord(56, 16), PIXELS, PlaceholderRecord(7, 8, 9)).image_text(names.__getitem__)
    assert text.placeholder == "<start_of_image>"
    assert text.expanded(3) == "\n\n<start_of_image>" + "<image_soft_token>" * 3 + "<end_of_image>\n\n"
