"""What the tests of InternVL share: a tiny checkpoint, its prompts, and Hugging Face's numbers for them."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor

from image_kit import END, IMAGE, START, VIDEO, generate_greedily
from pop_reference import PromptImages
from vision_engine_kit import save_image_tokenizer

NUM_LAYERS, VOCAB_SIZE, HIDDEN_SIZE = 3, 320, 64
# Sixteen patches of a tile, of which four become a token.
TILE_SIZE, TOKENS_PER_TILE = 28, 4
MAX_TILES = 6

# By the names that InternVL's tokenizers have.
TOKENS = {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", START: "<img>", END: "</img>"}
# Rendered like InternVL3's own, with the parts that matter here.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<IMG_CONTEXT>\n{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)

Piece = int | Image.Image


def tiny_config(**vision_options: Any) -> InternVLConfig:
    """Qwen2 with three layers, as the smaller checkpoints have it, behind a tower of two."""
    text = {
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "image_size": [TILE_SIZE, TILE_SIZE],
        "patch_size": [7, 7],
    }
    return InternVLConfig(
        text_config=text,
        vision_config=vision | vision_options,
        image_token_id=IMAGE,
        image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=False,
    )


def save_tiny_internvl(folder: Path, **vision_options: Any) -> Path:
    """A random checkpoint as transformers saves it, with weights large enough that the top logits lie far apart."""
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(tiny_config(**vision_options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = weight.dim() == 1 and not name.endswith("bias")
            weight.copy_(torch.rand_like(weight) + 0.5 if is_scale else torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    save_image_tokenizer(folder, TOKENS, CHAT_TEMPLATE)
    return folder


def processor() -> Any:
    """Hugging Face's own, at the tiny model's size."""
    return GotOcr2ImageProcessorPil(size={"height": TILE_SIZE, "width": TILE_SIZE}, max_patches=MAX_TILES)


def hf_tiles(images: list[Image.Image]) -> tuple[torch.Tensor, list[int]]:
    """Tiles [tiles, 3, size, size] of all images, as InternVLProcessor asks for them, and how many are each one's."""
    processed = processor()(images, return_tensors="pt", **InternVLProcessor.images_kwargs)
    return processed["pixel_values"], processed["num_patches"].tolist()


def load_hf_model(folder: Path) -> Any:
    """The checkpoint in Hugging Face's own class, fp32."""
    return InternVLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@dataclass(frozen=True)
class Prompt:
    """A prompt as the Hugging Face model takes it, and its images."""

    input_ids: torch.Tensor
    images: tuple[Image.Image, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return [int(token_id) for token_id in self.input_ids[0]]

    def arguments(self) -> dict[str, torch.Tensor]:
        """What to call the model with."""
        if not self.images:
            return {"input_ids": self.input_ids}
        return {"input_ids": self.input_ids, "pixel_values": hf_tiles(list(self.images))[0]}


def make_prompt(pieces: list[Piece], seed: int = 0, num_dropped: int = 0) -> Prompt:
    """Text tokens, so many of them for each number, and images between their start and end tokens.

    The last `num_dropped` tokens are left out: after 1 a prompt that ends with an image ends with its last token.
    """
    random = np.random.default_rng(seed)
    images = [piece for piece in pieces if isinstance(piece, Image.Image)]
    num_tiles = iter(hf_tiles(images)[1] if images else ())
    token_ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            token_ids += [int(token_id) for token_id in random.integers(1, IMAGE, piece)]
        else:
            token_ids += [START, *[IMAGE] * (next(num_tiles) * TOKENS_PER_TILE), END]
    kept = token_ids[: len(token_ids) - num_dropped]
    return Prompt(torch.tensor([kept]), tuple(images))


@torch.no_grad()
def hf_features(hf_model: Any, images: list[Image.Image]) -> torch.Tensor:
    """Features [T, hidden] of all of these images."""
    features: torch.Tensor = hf_model.model.get_image_features(hf_tiles(images)[0], return_dict=True).pooler_output
    return features.flatten(0, 1)


def hf_image_text(num_tiles: int) -> str:
    """What InternVLProcessor writes for an image, without the torchvision that making one takes."""
    names: Any = SimpleNamespace(
        start_image_token=TOKENS[START],
        end_image_token=TOKENS[END],
        image_token=TOKENS[IMAGE],
        image_seq_length=TOKENS_PER_TILE,
    )
    return InternVLProcessor.replace_image_token(names, {"num_patches": [num_tiles]}, 0)


def hf_greedy(hf_model: Any, prompt: Prompt, max_tokens: int) -> tuple[list[int], NDArray[np.float32]]:
    """Tokens and logits of Hugging Face's `generate`."""
    return generate_greedily(hf_model, prompt.arguments(), max_tokens)


def golden_images(prompt: Prompt, hf_model: Any) -> PromptImages | None:
    """A prompt's images for the golden reference: the features are Hugging Face's."""
    if not prompt.images:
        return None
    is_image = prompt.input_ids[0] == IMAGE
    features = hf_features(hf_model, list(prompt.images))
    positions = torch.arange(len(is_image))[None]
    return PromptImages(is_image, positions, features, deepstack=features.new_zeros(0, *features.shape))
