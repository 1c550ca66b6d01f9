"""InternVL (the checkpoints named -hf): an image is cut into square tiles, and each goes through the tower alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from pop_engine.builder.export.families.image_processor import expand_placeholders, pixel_record, square_processor
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import ImageAttention, ImageFacts, PlaceholderRecord, TileRecord

# Where the class takes its feature map from, unless a config says otherwise.
_LAST_LAYER, _WITHOUT_CLASS_TOKEN = -1, "default"


class InternVL:
    """See VisionFamily. Classes named here are those of transformers.models.internvl."""

    model_type = "internvl"
    image_attention: ImageAttention = "causal"

    def image_facts(self, config: PretrainedConfig, folder: Path | None) -> ImageFacts:
        """See VisionFamily. Videos are not taken."""
        _check_features(config)
        processor = _open_processor(config, folder)
        return ImageFacts(
            inputs=_image_inputs(config),
            processor="internvl",
            placeholders=PlaceholderRecord(config.image_token_id),
            pixels=pixel_record(processor),
            image_attention=self.image_attention,
            tiles=TileRecord(_tile_size(config), _tokens_per_tile(config), *_tile_counts(processor)),
        )

    def vision_contract(self, config: PretrainedConfig, dtype: str) -> io.GraphContract:
        """See VisionFamily."""
        return io.fixed_size_contract(_image_inputs(config), dtype, _tile_size(config), _tokens_per_tile(config))

    def patches_per_token(self, config: PretrainedConfig) -> int:
        """See VisionFamily."""
        return 1

    def adapt(self, model: PreTrainedModel) -> None:
        """Nothing: all of it can be traced."""

    def encode(self, model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See VisionFamily. One tile of an image."""
        encoded = model.model.get_image_features(inputs[io.PIXEL_VALUES], return_dict=True)
        return {io.IMAGE_FEATURES: encoded.pooler_output[0]}

    def model_inputs(
        self, config: PretrainedConfig, folder: Path | None, token_ids: Sequence[int], images: Sequence[Image]
    ) -> dict[str, torch.Tensor]:
        """See VisionFamily."""
        # As InternVLProcessor calls it, whatever the file says.
        processor = _open_processor(config, folder)
        processed = processor(list(images), return_tensors="pt", **InternVLProcessor.images_kwargs)
        num_tokens = [count * _tokens_per_tile(config) for count in processed["num_patches"].tolist()]
        input_ids = expand_placeholders(token_ids, config.image_token_id, num_tokens)
        return {"input_ids": input_ids, "pixel_values": processed["pixel_values"]}


def _image_inputs(config: PretrainedConfig) -> io.ImageInputs:
    return io.ImageInputs(config.text_config.hidden_size, num_deepstack=0, positions="text")


def _tile_size(config: PretrainedConfig) -> int:
    return int(config.vision_config.image_size[0])


def _tokens_per_tile(config: PretrainedConfig) -> int:
    """Patches of a tile, after the pixel shuffle has put a square of them into one (InternVLModel.pixel_shuffle)."""
    patches_per_side = _tile_size(config) // config.vision_config.patch_size[0]
    return int(patches_per_side * config.downsample_ratio) ** 2


def _tile_counts(processor: Any) -> tuple[int, int]:
    """The fewest and the most tiles of an image, its small copy not among them."""
    fewest, most = int(processor.min_patches), int(processor.max_patches)
    if not 1 <= fewest <= most:
        raise UsageError(
            f"image processor: min_patches {fewest}, max_patches {most}; expected 1 or more, the second no smaller"
        )
    return fewest, most


def _check_features(config: PretrainedConfig) -> None:
    """Raise UsageError where the tower's features are not a square map of its last layer."""
    vision, ratio = config.vision_config, config.downsample_ratio
    taken = (config.vision_feature_layer, config.vision_feature_select_strategy)
    if taken != (_LAST_LAYER, _WITHOUT_CLASS_TOKEN):
        raise UsageError(
            f"vision_feature_layer {taken[0]}, vision_feature_select_strategy {taken[1]}: "
            f"expected {_LAST_LAYER} and {_WITHOUT_CLASS_TOKEN}; no other feature map is supported"
        )
    (height, width), (patch_height, patch_width) = vision.image_size, vision.patch_size
    if height != width or patch_height != patch_width or height // patch_height * ratio % 1:
        raise UsageError(
            f"vision tower of {height}x{width} pixels in patches of {patch_height}x{patch_width}, downsample_ratio "
            f"{ratio}: expected squares, and as many patches a side as the ratio divides"
        )


def _open_processor(config: PretrainedConfig, folder: Path | None) -> Any:
    return square_processor(GotOcr2ImageProcessorPil, folder, _tile_size(config))
