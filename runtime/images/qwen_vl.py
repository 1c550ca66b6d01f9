"""Images of any size, cut into patches (Hugging Face's Qwen2VLImageProcessor)."""

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.vision import PatchRecord, PixelRecord, PlaceholderRecord
from pop_engine.runtime.images.loading import ImageSource, load_image, show_source
from pop_engine.runtime.images.patches import (
    check_aspect_ratio,
    image_of_size,
    patch_positions,
    smart_resize,
    table_positions,
)
from pop_engine.runtime.images.pixels import PixelScale
from pop_engine.runtime.images.processor import ImageText, PromptImage, TokenText


class QwenVLProcessor:
    """See ImageProcessor. Patches go in blocks of `merge_size` squared: a block becomes one token."""

    def __init__(self, patches: PatchRecord, pixels: PixelRecord, placeholders: PlaceholderRecord) -> None:
        self._patches = patches
        self._scale = PixelScale(pixels)
        self._placeholders = placeholders

    def image(self, source: ImageSource) -> PromptImage:
        """See ImageProcessor. Raises UsageError above an aspect ratio of 200, as the Hugging Face class does."""
        loaded = load_image(source)
        check_aspect_ratio(show_source(source), loaded.height, loaded.width)
        patches = self._patches
        factor = patches.patch_size * patches.merge_size
        height, width = smart_resize(loaded.height, loaded.width, factor, patches.min_pixels, patches.max_pixels)
        return image_of_size((source,), height, width, patches)

    def vision_inputs(self, image: PromptImage) -> dict[str, NDArray[np.generic]]:
        """See ImageProcessor. A single frame stands for every one of its patch of time."""
        frames = [self._scale.scaled(load_image(frame), image.height, image.width) for frame in image.frames]
        rows, columns = patch_positions(image.rows, image.columns, self._patches.merge_size)
        inputs: dict[str, NDArray[np.generic]] = {
            io.PIXEL_VALUES: self._patchify(frames),
            io.ROTARY_POSITIONS: np.stack([rows, columns], axis=-1),
        }
        if self._patches.num_grid_per_side:
            indices, weights = table_positions(rows, columns, self._patches.num_grid_per_side)
            inputs |= {io.POSITION_INDICES: indices, io.POSITION_WEIGHTS: weights}
        return inputs

    def image_text(self, token_text: TokenText) -> ImageText:
        """See ImageProcessor."""
        token = token_text(self._placeholders.image)
        return ImageText(placeholder=token, token=token)

    def _patchify(self, frames: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Frames [C, H, W] of one patch of time to [patches, C * frames * patch_size ** 2], block by block."""
        patch, merge, num_frames = self._patches.patch_size, self._patches.merge_size, self._patches.temporal_patch_size
        channels, height, width = frames[0].shape
        block = patch * merge
        pixels = np.stack([frames[min(index, len(frames) - 1)] for index in range(num_frames)])
        blocks = pixels.reshape(num_frames, channels, height // block, merge, patch, width // block, merge, patch)
        ordered = blocks.transpose(2, 5, 3, 6, 1, 0, 4, 7)
        return np.ascontiguousarray(ordered).reshape(-1, channels * num_frames * patch * patch)
