"""InternVL's tiles and their text against transformers' processor."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor as HfProcessor

from image_kit import IMAGE, random_image
from internvl_kit import TOKENS, TOKENS_PER_TILE, hf_image_text
from pop_engine.configs.io_contract import PIXEL_VALUES
from pop_engine.configs.vision import PixelRecord, PlaceholderRecord, TileRecord
from pop_engine.runtime.images.internvl import InternVLProcessor, tile_grid
from vision_engine_kit import as_png

SIDE = 28
PIXELS = PixelRecord(3, 1 / 255, (0.48, 0.45, 0.4), (0.26, 0.25, 0.27))
# Fewest and most tiles: the published checkpoints', none but one, and a least number.
COUNTS = [(1, 12), (1, 1), (4, 6)]
counts = pytest.mark.parametrize("tile_counts", COUNTS)


def processor(min_tiles: int, max_tiles: int) -> InternVLProcessor:
    return InternVLProcessor(TileRecord(SIDE, TOKENS_PER_TILE, min_tiles, max_tiles), PIXELS, PlaceholderRecord(IMAGE))


def hf_pixels(image: Image.Image, min_tiles: int, max_tiles: int) -> NDArray[np.float32]:
    hf_processor: Any = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        image_mean=list(PIXELS.image_mean),
        image_std=list(PIXELS.image_std),
        min_patches=min_tiles,
        max_patches=max_tiles,
    )
    return np.asarray(hf_processor(image, return_tensors="np", **HfProcessor.images_kwargs)["pixel_values"])


@counts
@pytest.mark.parametrize("size", [(1, 1), (28, 28), (56, 28), (37, 91), (300, 40), (5, 211)])
def test_tiles_equal_transformers(size: tuple[int, int], tile_counts: tuple[int, int]) -> None:
    ours, image = processor(*tile_counts), random_image(size)
    found = ours.image(as_png(image))
    tiles, expected = ours.vision_inputs(found)[PIXEL_VALUES], hf_pixels(image, *tile_counts)
    assert np.array_equal(tiles, expected)
    assert found.num_tokens == len(expected) * TOKENS_PER_TILE


@counts
def test_grids_equal_transformers(tile_counts: tuple[int, int]) -> None:
    """Sizes at which several grids are as near are among them, small images and large."""
    tiles = TileRecord(SIDE, TOKENS_PER_TILE, *tile_counts)
    for height in [*range(1, 60), 112, 168, 224, 1000]:
        for width in [*range(1, 60), 84, 140, 280, 999]:
            columns, rows = get_optimal_tiled_canvas((height, width), (SIDE, SIDE), *tile_counts)
            assert tile_grid(height, width, tiles) == (rows, columns)


def test_an_image_in_the_text_is_as_transformers_writes_it() -> None:
    text = processor(1, 12).image_text(TOKENS.__getitem__)
    assert text.placeholder == "<IMG_CONTEXT>"
    assert text.expanded(3 * TOKENS_PER_TILE) == hf_image_text(3)
