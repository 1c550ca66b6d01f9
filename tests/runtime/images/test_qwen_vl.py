"""Qwen-VL's images against transformers: sizes, patches and positions to the bit."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from pop_engine.configs import io_contract
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import PatchRecord, PixelRecord, PlaceholderRecord
from pop_engine.runtime.images.patches import smart_resize
from pop_engine.runtime.images.qwen_vl import QwenVLProcessor

SIDE = 48
# Sides that are not multiples, one pixel, very wide, above the largest size, below the smallest.
SIZES = [(37, 91), (1, 1), (3, 600), (33, 33), (480, 640), (500, 1100), (15, 17)]
PIXELS = PixelRecord(3, 1 / 255, (0.5, 0.45, 0.4), (0.5, 0.25, 0.2))


def processor(patch_size: int = 16, side: int = SIDE) -> QwenVLProcessor:
    patches = PatchRecord(patch_size, 2, 2, min_pixels=4096, max_pixels=200_000, num_grid_per_side=side)
    return QwenVLProcessor(patches, PIXELS, PlaceholderRecord(5))


def hf_processor(patch_size: int = 16) -> Any:
    return Qwen2VLImageProcessorPil(
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 4096, "longest_edge": 200_000},
        image_mean=list(PIXELS.image_mean),
        image_std=list(PIXELS.image_std),
    )


def picture(height: int, width: int) -> tuple[Image.Image, bytes]:
    image = Image.fromarray(np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return image, buffer.getvalue()


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize("size", SIZES)
def test_patches_and_positions_equal_transformers(size: tuple[int, int], patch_size: int) -> None:
    image, content = picture(*size)
    ours = processor(patch_size)
    found = ours.image(content)
    inputs = ours.vision_inputs(found)
    expected = hf_processor(patch_size)(images=image, return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, found.rows * 2, found.columns * 2]]
    assert found.num_tokens * 4 == len(expected["pixel_values"])
    assert np.array_equal(inputs[io_contract.PIXEL_VALUES], expected["pixel_values"])
    grid = torch.tensor(expected["image_grid_thw"])
    indices, weights = get_vision_interpolation_indices_and_weights(grid, SIDE, "bilinear", True, 2)
    assert np.array_equal(inputs[io_contract.POSITION_INDICES], indices.numpy())
    assert np.abs(inputs[io_contract.POSITION_WEIGHTS] - weights.numpy()).max() < 1e-6
    assert np.array_equal(inputs[io_contract.ROTARY_POSITIONS], get_vision_position_ids(grid, 2).numpy())


def test_a_tower_without_a_table_gets_no_table_positions() -> None:
    ours = processor(side=0)
    inputs = ours.vision_inputs(ours.image(picture(64, 64)[1]))
    assert inputs.keys() == {io_contract.PIXEL_VALUES, io_contract.ROTARY_POSITIONS}


def test_above_an_aspect_ratio_of_200_both_refuse() -> None:
    image, content = picture(2, 402)
    with pytest.raises(UsageError, match="402x2 pixels; expected an aspect ratio of at most 200: crop it"):
        processor().image(content)
    with pytest.raises(ValueError, match="aspect ratio"):
        hf_processor()(images=image, return_tensors="np")
    assert processor().image(picture(2, 400)[1]).num_tokens > 0


def test_sizes_equal_transformers_over_many_shapes() -> None:
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as hf

    rng = np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(side) for side in rng.integers(20, 3000, 2))
        limits = {"min_pixels": 65_536, "max_pixels": int(rng.integers(70_000, 4_000_000))}
        assert smart_resize(height, width, 32, **limits) == hf.smart_resize(height, width, 32, **limits)
