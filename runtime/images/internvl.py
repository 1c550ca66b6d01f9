"""Images cut into square tiles, as InternVL takes them (Hugging Face's InternVLProcessor, GotOcr2ImageProcessor)."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.vision import PixelRecord, PlaceholderRecord, TileRecord
from pop_engine.runtime.images.loading import ImageSource, load_image
from pop_engine.runtime.images.pixels import NUM_CHANNELS, PixelScale
from pop_engine.runtime.images.processor import ImageText, PromptImage, TokenText

# Its tokenizers know these two; the config, which names the token between them, does not.
_START, _END = "<img>", "</img>"


class InternVLProcessor:
    """See ImageProcessor. Where an image has several tiles, a small copy of all of it is the last one."""

    def __init__(self, tiles: TileRecord, pixels: PixelRecord, placeholders: PlaceholderRecord) -> None:
        self._tiles = tiles
        self._scale = PixelScale(pixels)
        self._placeholders = placeholders

    def image(self, source: ImageSource) -> PromptImage:
        """See ImageProcessor."""
        loaded = load_image(source)
        rows, columns = tile_grid(loaded.height, loaded.width, self._tiles)
        side, num_tiles = self._tiles.tile_size, rows * columns
        if num_tiles > 1:
            num_tiles += 1
        return PromptImage((source,), rows * side, columns * side, num_tiles, self._tiles.tokens_per_tile)

    def vision_inputs(self, image: PromptImage) -> dict[str, NDArray[np.generic]]:
        """See ImageProcessor. Tiles [tiles, channels, tile_size, tile_size], row by row."""
        loaded, side = load_image(image.frames[0]), self._tiles.tile_size
        whole = self._scale.scaled(loaded, image.height, image.width)
        rows, columns = image.height // side, image.width // side
        cut = whole.reshape(NUM_CHANNELS, rows, side, columns, side).transpose(1, 3, 0, 2, 4)
        tiles = cut.reshape(-1, NUM_CHANNELS, side, side)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self._scale.scaled(loaded, side, side)[None]])
        return {io.PIXEL_VALUES: np.ascontiguousarray(tiles)}

    def image_text(self, token_text: TokenText) -> ImageText:
        """See ImageProcessor."""
        token = token_text(self._placeholders.image)
        return ImageText(placeholder=token, token=token, prefix=_START, suffix=_END)


def tile_grid(height: int, width: int, tiles: TileRecord) -> tuple[int, int]:
    """Rows and columns of tiles whose aspect ratio is nearest to an image's (HF get_optimal_tiled_canvas).

    Of several as near it is the largest of less than twice the image's area, or the smallest of all.
    """
    grids = sorted(_grids(tiles), key=lambda grid: grid[0] * grid[1])
    distances = [abs(width / height - columns / rows) for rows, columns in grids]
    near = [grid for grid, distance in zip(grids, distances, strict=True) if distance == min(distances)]
    tile_area = tiles.tile_size**2
    fitting = [(rows, columns) for rows, columns in near[1:] if rows * columns * tile_area < 2 * height * width]
    return (near[:1] + fitting)[-1]


def _grids(tiles: TileRecord) -> Iterator[tuple[int, int]]:
    """Rows and columns of every grid that is allowed, narrow ones first."""
    for columns in range(1, tiles.max_tiles + 1):
        for rows in range(1, tiles.max_tiles // columns + 1):
            if rows * columns >= tiles.min_tiles:
                yield rows, columns
