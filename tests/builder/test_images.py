"""What a build finds out about images before anything is traced, and what it refuses."""

import json
from pathlib import Path

import pytest
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from image_answers import write_settings
from image_kit import END, IMAGE, MERGE, NUM_LAYERS, PATCH, START, VIDEO, processor, tiny_config
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.source import ConfigOnlyCheckpoint
from pop_engine.builder.images import find_image_facts, save_processor
from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import ModelSource
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.vision import ImageFacts

PLAN = PrunePlan(NUM_LAYERS, 2)


class FolderCheckpoint(ConfigOnlyCheckpoint):
    """A checkpoint that has a folder with the processor's files, and nothing else."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__(ModelSource("tiny", str(folder)), BuildOptions(), tiny_config())
        object.__setattr__(self, "processor_folder", folder)


def facts_of(folder: Path | None, plan: PrunePlan = PLAN) -> ImageFacts:
    facts = find_image_facts(FolderCheckpoint(folder), plan)
    assert facts is not None
    return facts


def test_facts_are_those_of_the_checkpoints_files(tmp_path: Path) -> None:
    facts = facts_of(write_settings(processor(), tmp_path, {"image_mean": [0.5, 0.25, 0.125], "do_rescale": False}))
    assert facts.patches is not None
    assert (facts.patches.patch_size, facts.patches.merge_size, facts.patches.num_grid_per_side) == (PATCH, MERGE, 6)
    assert (facts.patches.min_pixels, facts.patches.max_pixels) == (16 * 16, 64 * 64)
    assert facts.pixels.image_mean == (0.5, 0.25, 0.125)
    assert facts.pixels.rescale_factor == 1.0
    marks = facts.placeholders
    assert (marks.image, marks.start, marks.end, marks.video) == (IMAGE, START, END, VIDEO)
    assert (facts.inputs.num_deepstack, facts.inputs.positions) == (2, "mrope")


def test_old_names_of_the_sizes_are_understood(tmp_path: Path) -> None:
    folder = write_settings(processor(), tmp_path, {"min_pixels": 64, "max_pixels": 640})
    patches = facts_of(folder).patches
    assert patches is not None
    assert (patches.min_pixels, patches.max_pixels) == (64, 640)


def test_without_files_the_classes_defaults_hold() -> None:
    facts, defaults = facts_of(None), Qwen2VLImageProcessorPil()
    assert facts.patches is not None
    assert facts.patches.max_pixels == defaults.size["longest_edge"]
    assert facts.pixels.image_mean == tuple(defaults.image_mean)
    # Patches are the vision tower's, whatever the class would say.
    assert facts.patches.patch_size == PATCH != defaults.patch_size


def test_frames_of_videos_are_those_of_the_checkpoints_file(tmp_path: Path) -> None:
    facts = facts_of(write_settings(processor(), tmp_path, {}))
    assert facts.video is not None
    assert (facts.video.fps, facts.video.min_frames) == (Qwen3VLVideoProcessor.fps, Qwen3VLVideoProcessor.min_frames)
    settings = {"fps": 1, "min_frames": 2, "size": {"shortest_edge": 96, "longest_edge": 960}}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    video = facts_of(tmp_path).video
    assert video is not None
    assert (video.fps, video.min_frames, video.min_pixels, video.max_pixels) == (1.0, 2, 96, 960)
    assert video.max_frames == Qwen3VLVideoProcessor.max_frames


def test_files_are_copied(tmp_path: Path) -> None:
    source, engine = tmp_path / "source", tmp_path / "engine"
    engine.mkdir()
    write_settings(processor(), source, {})
    (source / "video_preprocessor_config.json").write_text("{}", encoding="utf-8")
    names = save_processor(FolderCheckpoint(source), engine)
    assert set(names) == {"preprocessor_config.json", "video_preprocessor_config.json"}
    assert all((engine / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert save_processor(FolderCheckpoint(None), engine) == ()


def test_patches_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = write_settings(processor(), tmp_path, {"patch_size": PATCH + 1})
    with pytest.raises(UsageError, match=f"has patch_size {PATCH + 1}, its vision tower {PATCH}"):
        facts_of(folder)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="its image processor cannot be read"):
        facts_of(tmp_path)


def test_tail_among_the_deepstack_layers_is_refused() -> None:
    assert facts_of(None, PrunePlan(NUM_LAYERS, 2))
    with pytest.raises(UsageError, match=r"--tail-layers 3: .*DeepStack.*; give 2 or less"):
        facts_of(None, PrunePlan(NUM_LAYERS, 3))


def test_family_without_a_file_is_refused() -> None:
    content = Qwen2VLConfig().to_dict()
    with pytest.raises(UsageError, match=r"preset x: qwen2_vl takes images in a way .* or one of .*qwen3_vl"):
        config_from_mapping(content, "preset x")
