"""Qwen3-VL (dense): a vision tower for any resolution, DeepStack, interleaved multimodal rotary embedding."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig, PreTrainedModel

from pop_engine.builder.export.families.image_processor import pixel_record
from pop_engine.builder.export.families.qwen_vl_processor import (
    model_inputs,
    open_processor,
    patch_record,
    placeholder_record,
    video_record,
)
from pop_engine.configs import io_contract as io
from pop_engine.configs.vision import ImageAttention, ImageFacts

_NUM_TAPS = 4


class Qwen3VL:
    """See VisionFamily. Classes named here are those of transformers.models.qwen3_vl."""

    model_type = "qwen3_vl"
    image_attention: ImageAttention = "causal"

    def image_facts(self, config: PretrainedConfig, folder: Path | None) -> ImageFacts:
        """See VisionFamily."""
        processor = open_processor(config, folder)
        return ImageFacts(
            inputs=_image_inputs(config),
            processor="qwen-vl",
            placeholders=placeholder_record(config),
            pixels=pixel_record(processor),
            image_attention=self.image_attention,
            patches=patch_record(processor, int(config.vision_config.num_position_embeddings**0.5)),
            video=video_record(folder),
        )

    def vision_contract(self, config: PretrainedConfig, dtype: str) -> io.GraphContract:
        """See VisionFamily."""
        vision = config.vision_config
        patch_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return io.patches_contract(_image_inputs(config), dtype, patch_size, num_taps=_NUM_TAPS, has_rotary=True)

    def patches_per_token(self, config: PretrainedConfig) -> int:
        """See VisionFamily."""
        return int(config.vision_config.spatial_merge_size**2)

    def adapt(self, model: PreTrainedModel) -> None:
        """Rotary tables choose each frequency's axis by one lookup, and patches are embedded by a plain product."""
        rotary, patches = model.model.language_model.rotary_emb, model.model.visual.patch_embed
        rotary.forward = _InterleavedRotary(rotary)
        patches.forward = _patch_product(patches)

    def encode(self, model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See VisionFamily."""
        pixels = inputs[io.PIXEL_VALUES]
        encoded = model.model.visual(
            pixels,
            grid_thw=None,
            interp_indices=inputs[io.POSITION_INDICES],
            interp_weights=inputs[io.POSITION_WEIGHTS],
            position_ids=inputs[io.ROTARY_POSITIONS],
            cu_seqlens=_OneImage(pixels.shape[0]),
        )
        features = {io.IMAGE_FEATURES: encoded.pooler_output}
        if encoded.deepstack_features:
            features[io.DEEPSTACK_FEATURES] = torch.stack(encoded.deepstack_features)
        return features

    def model_inputs(
        self, config: PretrainedConfig, folder: Path | None, token_ids: Sequence[int], images: Sequence[Image]
    ) -> dict[str, torch.Tensor]:
        """See VisionFamily."""
        return model_inputs(open_processor(config, folder), token_ids, images, config.image_token_id)


def _image_inputs(config: PretrainedConfig) -> io.ImageInputs:
    return io.ImageInputs(
        config.text_config.hidden_size, len(config.vision_config.deepstack_visual_indexes), positions="mrope"
    )


class _OneImage:
    """Stands for the bounds between images, of which a call has one: all its rows attend to each other."""

    def __init__(self, num_patches: int | torch.SymInt) -> None:
        self._num_patches = num_patches

    def __getitem__(self, index: slice) -> "_OneImage":
        return self

    def __sub__(self, other: "_OneImage") -> "_OneImage":
        return self

    def tolist(self) -> list[int | torch.SymInt]:
        """Lengths of the images."""
        return [self._num_patches]


class _InterleavedRotary:
    """Stands for Qwen3VLTextRotaryEmbedding.forward, which writes the axes over each other, column by column."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        num_frequencies = rotary.inv_freq.numel()
        with _disable_current_modes():
            # What the class does to tables that hold nothing but their axis.
            axes = torch.arange(io.NUM_MROPE_AXES).view(-1, 1, 1, 1).repeat(1, 1, 1, num_frequencies)
            self._axes = rotary.recomposition_frequencies(axes)[0, 0, :num_frequencies]

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables [B, rows, D] of positions [3, B, rows]."""
        positions = position_ids.expand(io.NUM_MROPE_AXES, -1, -1).index_select(0, self._axes).permute(1, 2, 0)
        angles = positions.float() * self._rotary.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        scaling = self._rotary.attention_scaling
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)


def _patch_product(patches: Any) -> Any:
    """Qwen3VLVisionPatchEmbed.forward: a convolution whose stride is its kernel is a product."""
    projection: nn.Conv3d = patches.proj

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        weight = projection.weight.flatten(1)
        return functional.linear(pixels.to(weight.dtype), weight, projection.bias)

    return forward
