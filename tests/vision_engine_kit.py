"""Engines of the tiny Qwen3-VL with a tokenizer and a chat template, for the tests of the runtime."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from image_kit import END, IMAGE, START, VIDEO, Prompt, make_prompt, save_tiny_qwen3_vl

MAX_SEQ_LEN, NUM_SLOTS = 160, 3
# Rendered like Qwen3-VL's own, with the parts that matter here.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
_TOKENS = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
_MORE_TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")
_CORPUS = ["the cat sat on the mat and then the other cat ran to the hat", "user assistant system image describe what"]


def save_vision_checkpoint(folder: Path) -> Path:
    """The tiny Qwen3-VL, with a byte-level tokenizer in which its placeholders have the ids of its config."""
    save_tiny_qwen3_vl(folder)
    save_image_tokenizer(folder, _TOKENS, CHAT_TEMPLATE)
    return folder


def save_image_tokenizer(folder: Path, image_tokens: Mapping[int, str], chat_template: str) -> None:
    """A byte-level tokenizer in which these tokens have these ids, IMAGE and those that follow it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=IMAGE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == IMAGE
    tokens = [*(image_tokens[token_id] for token_id in sorted(image_tokens)), *_MORE_TOKENS]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def save_frames(folder: Path, count: int, size: tuple[int, int] = (48, 32)) -> list[NDArray[np.uint8]]:
    """Frames of noise, 0000.png and so on, of this width and height."""
    folder.mkdir(exist_ok=True)
    frames = [np.random.default_rng(index).integers(0, 256, (size[1], size[0], 3), np.uint8) for index in range(count)]
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"{index:04d}.png")
    return frames


def as_png(image: Image.Image) -> bytes:
    """An image file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def shown(num_tokens: int) -> str:
    """An image of so many tokens, as Qwen3VLProcessor writes it."""
    return "<|vision_start|>" + "<|image_pad|>" * num_tokens + "<|vision_end|>"


def prompt_tensors(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and grids of a prompt that has images."""
    assert prompt.pixel_values is not None
    assert prompt.image_grid_thw is not None
    return prompt.pixel_values, prompt.image_grid_thw


def image_at_the_end(hf_model: Any, image: Image.Image) -> tuple[Prompt, list[int], Any]:
    """A prompt whose last token is an image's, an answer, and the logits that it was chosen from.

    `generate` counts on from the last token's position, which is not the image's largest; one forward over all of it
    has the positions of get_rope_index.
    """
    prompt = make_prompt([4, image])
    prompt = Prompt(prompt.input_ids[:, :-1], *prompt_tensors(prompt))
    assert prompt.token_ids[-1] == IMAGE
    answer = [5, 17, 200, 9]
    hf_model.model.rope_deltas = None
    whole = Prompt(torch.tensor([prompt.token_ids + answer]), *prompt_tensors(prompt))
    with torch.no_grad():
        logits = hf_model(**whole.arguments()).logits[0, len(prompt.token_ids) - 1 : -1]
    return prompt, answer, logits.numpy()


def hf_video_text(metadata: VideoMetadata, grid: tuple[int, int, int]) -> str:
    """What Qwen3VLProcessor writes for a video, without the torchvision that making one takes."""
    nothing: Any = None
    processor: Any = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token="<|video_pad|>",
        _calculate_timestamps=lambda *given: Qwen3VLProcessor._calculate_timestamps(nothing, *given),
    )
    inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata]}
    return str(Qwen3VLProcessor.replace_video_token(processor, inputs, 0))
