"""Gemma 3 with images (4B, 12B, 27B): a SigLIP tower for square images, pooled and projected, seen as a whole."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from pop_engine.builder.export.families.image_processor import expand_placeholders, pixel_record, square_processor
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import FixedSizeRecord, ImageAttention, ImageFacts, PlaceholderRecord


class Gemma3:
    """See VisionFamily. Classes named here are those of transformers.models.gemma3."""

    model_type = "gemma3"
    image_attention: ImageAttention = "bidirectional"

    def image_facts(self, config: PretrainedConfig, folder: Path | None) -> ImageFacts:
        """See VisionFamily."""
        vocab_size = config.text_config.vocab_size
        if config.image_token_id >= vocab_size:
            raise UsageError(
                f"image_token_index {config.image_token_id}: beyond the vocabulary of {vocab_size} tokens; "
                "expected a Gemma 3 checkpoint, whose embeddings have a row for it"
            )
        return ImageFacts(
            inputs=_image_inputs(config),
            processor="siglip",
            placeholders=PlaceholderRecord(config.image_token_id, config.boi_token_id, config.eoi_token_id),
            pixels=pixel_record(_open_processor(config, folder)),
            image_attention=self.image_attention,
            fixed_size=FixedSizeRecord(config.vision_config.image_size, config.mm_tokens_per_image),
        )

    def vision_contract(self, config: PretrainedConfig, dtype: str) -> io.GraphContract:
        """See VisionFamily."""
        size, num_tokens = config.vision_config.image_size, config.mm_tokens_per_image
        return io.fixed_size_contract(_image_inputs(config), dtype, size, num_tokens)

    def patches_per_token(self, config: PretrainedConfig) -> int:
        """See VisionFamily."""
        return 1

    def adapt(self, model: PreTrainedModel) -> None:
        """Nothing: all of it can be traced."""

    def encode(self, model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See VisionFamily."""
        encoded = model.model.get_image_features(inputs[io.PIXEL_VALUES], return_dict=True)
        return {io.IMAGE_FEATURES: encoded.pooler_output[0]}

    def model_inputs(
        self, config: PretrainedConfig, folder: Path | None, token_ids: Sequence[int], images: Sequence[Image]
    ) -> dict[str, torch.Tensor]:
        """See VisionFamily."""
        processed = _open_processor(config, folder)(list(images), return_tensors="pt")
        input_ids = expand_placeholders(token_ids, config.image_token_id, repeat(config.mm_tokens_per_image))
        return {
            "input_ids": input_ids,
            "token_type_ids": (input_ids == config.image_token_id).int(),
            "pixel_values": processed["pixel_values"],
        }


def _image_inputs(config: PretrainedConfig) -> io.ImageInputs:
    return io.ImageInputs(config.text_config.hidden_size, num_deepstack=0, positions="text")


def _open_processor(config: PretrainedConfig, folder: Path | None) -> Any:
    """The processor of a checkpoint's folder, or the class's defaults, at the size of the vision tower.

    Raises UsageError where a file is damaged or of another size, or asks for crops.
    """
    processor = square_processor(Gemma3ImageProcessorPil, folder, config.vision_config.image_size)
    if processor.do_pan_and_scan:
        raise UsageError(f"{folder}: its image processor has do_pan_and_scan on, which is not supported; turn it off")
    return processor
