"""What the build must know about a family that takes images: one object a family."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from PIL.Image import Image
from transformers import PretrainedConfig, PreTrainedModel

from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.vision import ImageAttention, ImageFacts


class VisionFamily(Protocol):
    """Only a family's differences; how its language model is traced is every model's way.

    `model_type` is the one of its Hugging Face config, `image_attention` how an image's tokens see each other.
    """

    model_type: str
    image_attention: ImageAttention

    def image_facts(self, config: PretrainedConfig, folder: Path | None) -> ImageFacts:
        """How the model takes images. The processor's files are read from a checkpoint's folder, if there is one.

        Without files the defaults of its Hugging Face class hold. Raises UsageError where the files or the config
        ask for what is not supported.
        """

    def vision_contract(self, config: PretrainedConfig, dtype: str) -> GraphContract:
        """Bindings of the vision graph."""

    def patches_per_token(self, config: PretrainedConfig) -> int:
        """How many patches the vision graph makes one image token of; 1 where no input is made of patches."""

    def adapt(self, model: PreTrainedModel) -> None:
        """Give what cannot be traced as it is another form that computes the same."""

    def encode(self, model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the vision tower for one image: the vision graph's inputs to its outputs, by the contract's names."""

    def model_inputs(
        self, config: PretrainedConfig, folder: Path | None, token_ids: Sequence[int], images: Sequence[Image]
    ) -> Mapping[str, torch.Tensor]:
        """Arguments of the Hugging Face model, made by its own processor, for a prompt with a placeholder an image.

        `input_ids` is among them, every placeholder repeated for each of its image's tokens.
        """
