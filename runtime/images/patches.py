"""Images as patches: how large they become, and where each patch lies (HF smart_resize and vision_utils)."""

import math

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import PatchRecord
from pop_engine.runtime.images.loading import Frame
from pop_engine.runtime.images.processor import PromptImage

MAX_ASPECT_RATIO = 200


def check_aspect_ratio(shown: str, height: int, width: int) -> None:
    """Raise UsageError above an aspect ratio of 200, where the Hugging Face classes raise too."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise UsageError(
            f"{shown}: {width}x{height} pixels; expected an aspect ratio of at most {MAX_ASPECT_RATIO}: crop it"
        )


def image_of_size(frames: tuple[Frame, ...], height: int, width: int, patches: PatchRecord) -> PromptImage:
    """An image, or the frames of one patch of time, at this size in pixels."""
    factor = patches.patch_size * patches.merge_size
    return PromptImage(frames, height, width, height // factor, width // factor)


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width as multiples of `factor`, of `min_pixels` to `max_pixels`, near the same aspect ratio.

    As the Hugging Face function of this name, rounding included.
    """
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if rounded[0] * rounded[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if rounded[0] * rounded[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


def patch_positions(rows: int, columns: int, merge_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column [patches] of every patch, block by block, of an image of these rows and columns of tokens."""
    block_row, block_column, row, column = np.indices((rows, columns, merge_size, merge_size), np.int64)
    return (block_row * merge_size + row).ravel(), (block_column * merge_size + column).ravel()


def table_positions(
    rows: NDArray[np.int64], columns: NDArray[np.int64], side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Where each patch lies in a learned table of `side` squared positions: four entries [patches, 4], and weights.

    Bilinear with the corners aligned, as Hugging Face's get_vision_interpolation_indices_and_weights.
    """
    row_taps, row_weights = _axis_taps(rows, side)
    column_taps, column_weights = _axis_taps(columns, side)
    indices = row_taps[:, :, None] * side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.reshape(-1, 4), weights.reshape(-1, 4)


def _axis_taps(index: NDArray[np.int64], side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The two entries [patches, 2] of one axis around each patch, and their weights."""
    last = np.float32(max(index.max(), 1))
    source = index.astype(np.float32) * np.float32(side - 1) / last
    floor = np.floor(source)
    offsets = np.arange(2)
    taps = np.clip(floor.astype(np.int64)[:, None] + offsets, 0, side - 1)
    distance = np.abs(source[:, None] - floor[:, None] - offsets.astype(np.float32))
    return taps, np.maximum(np.float32(1) - distance, np.float32(0))
