"""The image processor that the Qwen-VL families share (HF Qwen2VLImageProcessor): its facts, and its own work."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import PretrainedConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from pop_engine.builder.export.families.image_processor import VIDEO_FILES, expand_placeholders, read_processor
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import PatchRecord, PlaceholderRecord, VideoRecord


def open_processor(config: PretrainedConfig, folder: Path | None) -> Qwen2VLImageProcessorPil:
    """The processor of a checkpoint's folder, or of the class's defaults; its patches are the vision tower's.

    Raises UsageError where a file is damaged, or cuts patches that the tower does not take.
    """
    vision = config.vision_config
    sizes = {
        "patch_size": int(vision.patch_size),
        "temporal_patch_size": int(vision.temporal_patch_size),
        "merge_size": int(vision.spatial_merge_size),
    }
    processor: Qwen2VLImageProcessorPil | None = read_processor(Qwen2VLImageProcessorPil, folder)
    if processor is None:
        default: Qwen2VLImageProcessorPil = Qwen2VLImageProcessorPil.from_dict(sizes)
        return default
    for name, size in sizes.items():
        if getattr(processor, name) != size:
            raise UsageError(
                f"{folder}: its image processor has {name} {getattr(processor, name)}, its vision tower {size}; "
                "the two are not of the same model"
            )
    return processor


def video_record(folder: Path | None) -> VideoRecord:
    """Which frames of a video are taken, as a checkpoint's folder or the class's defaults say (Qwen3VLVideoProcessor).

    Raises UsageError where a file is damaged.
    """
    processor = read_processor(Qwen3VLVideoProcessor, folder, VIDEO_FILES, "video") or Qwen3VLVideoProcessor
    return VideoRecord(
        fps=float(processor.fps),
        min_frames=int(processor.min_frames),
        max_frames=int(processor.max_frames),
        min_pixels=int(processor.size["shortest_edge"]),
        max_pixels=int(processor.size["longest_edge"]),
    )


def patch_record(processor: Any, num_grid_per_side: int) -> PatchRecord:
    """How an image is cut."""
    return PatchRecord(
        patch_size=processor.patch_size,
        temporal_patch_size=processor.temporal_patch_size,
        merge_size=processor.merge_size,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=processor.size["longest_edge"],
        num_grid_per_side=num_grid_per_side,
    )


def placeholder_record(config: PretrainedConfig) -> PlaceholderRecord:
    """The tokens around images, which the config names."""
    return PlaceholderRecord(
        image=config.image_token_id,
        start=config.vision_start_token_id,
        end=config.vision_end_token_id,
        video=config.video_token_id,
    )


def model_inputs(
    processor: Any, token_ids: Sequence[int], images: Sequence[Image], image_token_id: int
) -> dict[str, torch.Tensor]:
    """Arguments of the Hugging Face model, for a prompt with one placeholder an image: each is repeated as it must."""
    processed = processor(list(images), return_tensors="pt")
    num_tokens = (processed["image_grid_thw"].prod(dim=-1) // processor.merge_size**2).tolist()
    input_ids = expand_placeholders(token_ids, image_token_id, num_tokens)
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": (input_ids == image_token_id).int(),
        "pixel_values": processed["pixel_values"],
        "image_grid_thw": processed["image_grid_thw"],
    }
