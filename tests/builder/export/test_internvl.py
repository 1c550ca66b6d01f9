"""InternVL: what a build finds out about its images, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
from transformers import InternVLConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from image_answers import write_settings
from image_kit import IMAGE
from internvl_kit import HIDDEN_SIZE, MAX_TILES, TILE_SIZE, TOKENS_PER_TILE, processor, tiny_config
from pop_engine.builder.export.families.internvl import InternVL
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import ImageFacts, PlaceholderRecord, TileRecord


def facts_of(folder: Path | None) -> ImageFacts:
    return InternVL().image_facts(tiny_config(), folder)


def test_facts_are_those_of_the_checkpoints_files(tmp_path: Path) -> None:
    facts = facts_of(write_settings(processor(), tmp_path, {"image_mean": [0.5, 0.25, 0.125], "min_patches": 2}))
    assert facts.tiles == TileRecord(TILE_SIZE, TOKENS_PER_TILE, 2, MAX_TILES)
    assert facts.placeholders == PlaceholderRecord(IMAGE)
    assert facts.pixels.image_mean == (0.5, 0.25, 0.125)
    assert (facts.image_attention, facts.processor, facts.video) == ("causal", "internvl", None)
    assert (facts.inputs.hidden_size, facts.inputs.num_deepstack, facts.inputs.positions) == (HIDDEN_SIZE, 0, "text")


def test_without_files_the_classes_defaults_hold() -> None:
    """Tiles are the vision tower's, 448 pixels square and 256 tokens in the class's config."""
    config, defaults = InternVLConfig(), GotOcr2ImageProcessorPil()
    text: Any = config.text_config
    facts = InternVL().image_facts(config, None)
    assert facts.tiles == TileRecord(448, 256, defaults.min_patches, defaults.max_patches)
    assert facts.tiles.tokens_per_tile == config.image_seq_length
    contract = InternVL().vision_contract(config, "bf16")
    assert contract.inputs[0].shape == (1, 3, 448, 448)
    assert contract.outputs[0].shape == (256, text.hidden_size)


def test_a_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write_settings(processor(), tmp_path, {"size": {"height": 16, "width": TILE_SIZE}})
    with pytest.raises(UsageError, match=r"its image processor has size 16x28, its vision tower 28x28"):
        facts_of(folder)


@pytest.mark.parametrize("min_patches", [0, MAX_TILES + 1])
def test_impossible_numbers_of_tiles_are_refused(tmp_path: Path, min_patches: int) -> None:
    with pytest.raises(UsageError, match=f"min_patches {min_patches}, max_patches {MAX_TILES}; expected 1 or more"):
        facts_of(write_settings(processor(), tmp_path, {"min_patches": min_patches}))


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="its image processor cannot be read"):
        facts_of(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("vision_feature_layer", -2), ("vision_feature_select_strategy", "full")])
def test_other_features_are_refused(name: str, value: Any) -> None:
    config = tiny_config()
    setattr(config, name, value)
    with pytest.raises(UsageError, match=f"{name} {value}.*: expected -1 and default"):
        InternVL().image_facts(config, None)


@pytest.mark.parametrize("image_size", [[28, 56], [21, 21]])
def test_a_tower_whose_features_are_no_square_is_refused(image_size: list[int]) -> None:
    with pytest.raises(UsageError, match=rf"vision tower of {image_size[0]}x{image_size[1]} pixels.*expected squares"):
        InternVL().image_facts(tiny_config(image_size=image_size), None)
