"""Positions of prompts with images against Qwen3-VL's own get_rope_index."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from pop_engine.runtime.images.positions import mrope_positions
from pop_engine.runtime.images.processor import PromptImage
from pop_engine.runtime.images.prompt import PlacedImage

# Tokens of text, or rows and columns of an image.
Piece = int | tuple[int, int]
PROMPTS: dict[str, list[Piece]] = {
    "text": [7],
    "image at the start": [(2, 3), 4],
    "image in the middle": [5, (4, 2), 3],
    "image at the end": [5, (3, 3)],
    "image alone": [(1, 5)],
    "several": [1, (2, 6), 2, (5, 1), 1, (1, 1), 4],
}


class _Model:
    """What get_rope_index needs of a model: its config, and the positions of one image."""

    config = Qwen3VLConfig()
    get_vision_position_ids = Qwen3VLModel.get_vision_position_ids


def hf_positions(prompt: list[Piece]) -> tuple[Any, int]:
    types: list[int] = []
    grids: list[list[int]] = []
    for piece in prompt:
        types += [0] * piece if isinstance(piece, int) else [1] * (piece[0] * piece[1])
        if not isinstance(piece, int):
            grids.append([1, piece[0] * 2, piece[1] * 2])
    # Annotated with the classes of torch's old constructors, which no tensor is an instance of to a type checker.
    model: Any = _Model()
    ids: Any = torch.zeros((1, len(types)), dtype=torch.long)
    modalities: Any = torch.tensor([types])
    grid: Any = torch.tensor(grids) if grids else None
    positions, deltas = Qwen3VLModel.get_rope_index(model, ids, modalities, grid)
    return positions[:, 0].numpy(), int(deltas[0, 0]) + len(types)


def placed(prompt: list[Piece]) -> tuple[int, list[PlacedImage]]:
    place, images = 0, []
    for piece in prompt:
        if isinstance(piece, int):
            place += piece
        else:
            images.append(PlacedImage(place, PromptImage((), 0, 0, *piece)))
            place = images[-1].stop
    return place, images


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_transformers(name: str) -> None:
    prompt = PROMPTS[name]
    expected, expected_next = hf_positions(prompt)
    found, found_next = mrope_positions(*placed(prompt), first=0)
    assert np.array_equal(found, expected)
    assert found_next == expected_next


def test_more_of_a_conversation_goes_on_where_it_ended() -> None:
    """Two prompts one after the other have the positions of the one that they make."""
    first: list[Piece] = [3, (2, 4), 2]
    second: list[Piece] = [1, (3, 2), 2]
    whole, end = hf_positions([*first[:-1], 3, *second[1:]])
    begun, middle = mrope_positions(*placed(first), first=0)
    found, found_end = mrope_positions(*placed(second), first=middle)
    assert np.array_equal(np.concatenate([begun, found], axis=1), whole)
    assert found_end == end
