"""What the tests of Gemma 3 with images share: a tiny checkpoint, its prompts, and Hugging Face's numbers for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from image_kit import END, IMAGE, START, generate_greedily
from pop_reference import PromptImages

NUM_LAYERS, VOCAB_SIZE, HIDDEN_SIZE = 3, 320, 64
IMAGE_SIZE, NUM_TOKENS = 32, 16
# Narrower than an image, and both kinds of layers in a tail of two.
WINDOW = 10
LAYER_TYPES = ("sliding_attention", "full_attention", "sliding_attention")
OTHER_LAYER_TYPES = ("full_attention", "sliding_attention", "full_attention")

Piece = int | Image.Image


def tiny_config(*, layer_types: tuple[str, ...] = LAYER_TYPES) -> Gemma3Config:
    """Three decoder layers; the vision tower has 64 patches, of which four become a token."""
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "layer_types": list(layer_types),
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": 4,
        "vision_use_head": False,
    }
    return Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=NUM_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


def save_tiny_gemma3(folder: Path) -> Path:
    """A random checkpoint as transformers saves it, with weights large enough that the top logits lie far apart."""
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(tiny_config())
    with torch.no_grad():
        for weight in model.parameters():
            # Norms of Gemma add one to their weights.
            weight.copy_(torch.rand_like(weight) - 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def processor() -> Any:
    """Hugging Face's own, at the tiny model's size."""
    return Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})


def load_hf_model(folder: Path, *, layer_types: tuple[str, ...] = LAYER_TYPES) -> Any:
    """The checkpoint in Hugging Face's own class, fp32."""
    config = tiny_config(layer_types=layer_types)
    model = Gemma3ForConditionalGeneration.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the Hugging Face model takes it, and its images."""

    input_ids: torch.Tensor
    images: tuple[Image.Image, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return [int(token_id) for token_id in self.input_ids[0]]

    @property
    def pixel_values(self) -> torch.Tensor:
        pixels: torch.Tensor = processor()(list(self.images), return_tensors="pt")["pixel_values"]
        return pixels

    def arguments(self) -> dict[str, torch.Tensor]:
        """What to call the model with."""
        if not self.images:
            return {"input_ids": self.input_ids}
        types = (self.input_ids == IMAGE).int()
        return {"input_ids": self.input_ids, "token_type_ids": types, "pixel_values": self.pixel_values}


def make_prompt(pieces: list[Piece], seed: int = 0, num_dropped: int = 0) -> Prompt:
    """Text tokens, so many of them for each number, and images between their start and end tokens.

    The last `num_dropped` tokens are left out: after 1 a prompt that ends with an image ends with its last token.
    """
    random = np.random.default_rng(seed)
    token_ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            token_ids += [int(token_id) for token_id in random.integers(1, IMAGE, piece)]
        else:
            token_ids += [START, *[IMAGE] * NUM_TOKENS, END]
    kept = token_ids[: len(token_ids) - num_dropped]
    return Prompt(torch.tensor([kept]), tuple(piece for piece in pieces if isinstance(piece, Image.Image)))


@torch.no_grad()
def hf_features(hf_model: Any, prompt: Prompt) -> torch.Tensor:
    """Features [T, hidden] of all of a prompt's images."""
    features: torch.Tensor = hf_model.model.get_image_features(prompt.pixel_values, return_dict=True).pooler_output
    return features.flatten(0, 1)


@torch.no_grad()
def hf_logits(hf_model: Any, prompt: Prompt, answer: list[int], *, images_whole: bool = True) -> NDArray[np.float32]:
    """Logits after the prompt and after each token of an answer, from one call for all of it."""
    arguments = prompt.arguments() | {"input_ids": torch.cat([prompt.input_ids, torch.tensor([answer])], dim=1)}
    if "token_type_ids" in arguments:
        arguments["token_type_ids"] = (arguments["input_ids"] == IMAGE).int() * images_whole
    logits: NDArray[np.float32] = hf_model(**arguments, use_cache=False).logits[0, -len(answer) - 1 :].numpy()
    return logits


def hf_greedy(hf_model: Any, prompt: Prompt, max_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
    """Tokens and logits of Hugging Face's `generate`."""
    return generate_greedily(hf_model, prompt.arguments(), max_tokens)


def golden_images(prompt: Prompt, hf_model: Any) -> PromptImages | None:
    """A prompt's images for the golden reference: the features are Hugging Face's."""
    if not prompt.images:
        return None
    is_image = prompt.input_ids[0] == IMAGE
    number = torch.cumsum(prompt.input_ids[0] == START, 0)
    features = hf_features(hf_model, prompt)
    return PromptImages(
        is_image=is_image,
        positions=torch.arange(len(is_image))[None],
        features=features,
        deepstack=features.new_zeros(0, *features.shape),
        blocks=torch.where(is_image, number, 0),
    )
