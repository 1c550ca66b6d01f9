"""Gemma 3 with images: what a build finds out about them, and what it refuses."""

from pathlib import Path

import pytest

from gemma3_kit import HIDDEN_SIZE, IMAGE_SIZE, NUM_TOKENS, VOCAB_SIZE, processor, tiny_config
from image_answers import write_settings
from image_kit import END, IMAGE, START
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.preset import load_preset
from pop_engine.builder.export.families.gemma3 import Gemma3
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import FixedSizeRecord, ImageFacts, PlaceholderRecord


def facts_of(folder: Path | None) -> ImageFacts:
    return Gemma3().image_facts(tiny_config(), folder)


def test_facts_are_those_of_the_checkpoints_files(tmp_path: Path) -> None:
    facts = facts_of(write_settings(processor(), tmp_path, {"image_mean": [0.5, 0.25, 0.125], "do_rescale": False}))
    assert facts.fixed_size == FixedSizeRecord(IMAGE_SIZE, NUM_TOKENS)
    assert facts.placeholders == PlaceholderRecord(IMAGE, START, END)
    assert (facts.pixels.image_mean, facts.pixels.rescale_factor) == ((0.5, 0.25, 0.125), 1.0)
    assert (facts.image_attention, facts.processor, facts.video) == ("bidirectional", "siglip", None)
    assert (facts.inputs.hidden_size, facts.inputs.num_deepstack, facts.inputs.positions) == (HIDDEN_SIZE, 0, "text")


@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-3-12b", "gemma-3-27b"])
def test_presets_have_the_published_sizes(name: str) -> None:
    """Google's model card: 896 pixels square, 256 tokens an image."""
    config = config_from_mapping(load_preset(name).hf_config, name)
    facts = Gemma3().image_facts(config, None)
    assert facts.fixed_size == FixedSizeRecord(896, 256)
    # Bilinear, and from 0 … 255 to -1 … 1.
    assert (facts.pixels.resample, facts.pixels.image_mean, facts.pixels.image_std) == (2, (0.5,) * 3, (0.5,) * 3)
    contract = Gemma3().vision_contract(config, "bf16")
    assert contract.inputs[0].shape == (1, 3, 896, 896)
    assert contract.outputs[0].shape == (256, config.text_config.hidden_size)


def test_a_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = write_settings(processor(), tmp_path, {"size": {"height": 16, "width": IMAGE_SIZE}})
    with pytest.raises(UsageError, match=r"its image processor has size 16x32, its vision tower 32x32"):
        facts_of(folder)


def test_crops_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="do_pan_and_scan on, which is not supported"):
        facts_of(write_settings(processor(), tmp_path, {"do_pan_and_scan": True}))


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="its image processor cannot be read"):
        facts_of(tmp_path)


def test_an_image_token_without_an_embedding_is_refused() -> None:
    config = tiny_config()
    config.image_token_index = VOCAB_SIZE
    with pytest.raises(UsageError, match="image_token_index 320: beyond the vocabulary of 320 tokens"):
        Gemma3().image_facts(config, None)
