"""The prompts that an engine is checked with: seeded random tokens, and an image between some where it takes any."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from pop_engine.configs.manifest import Manifest
from pop_engine.configs.vision import VisionRecord

NUM_PROMPT_TOKENS = 80
NUM_DECODE_STEPS = 4
# Text before and after the image.
_NUM_BESIDE_IMAGE = 8
# Width by height: no multiple of a patch, and not square, so that rows and columns cannot be swapped unnoticed.
_ASPECT_RATIO = 1.37
# The same for tiles: an image twice as wide as it is high.
_NUM_TILES = 2


@dataclass(frozen=True)
class Sample:
    """A prompt and what comes after it, whatever the logits say. With an image, one of the tokens stands for it."""

    prompt: list[int]
    continuation: list[int]
    image: Image.Image | None = None


def text_sample(manifest: Manifest) -> Sample:
    """Text alone. A window takes none of the context's tokens away, where the engine has room for both."""
    window, max_seq_len = manifest.boundary_window, manifest.limits.max_seq_len
    num_steps = min(NUM_DECODE_STEPS, max_seq_len - 1)
    num_prompt = min(NUM_PROMPT_TOKENS + window - 1, max_seq_len - num_steps)
    drawn = _draw_tokens(manifest, num_prompt + num_steps)
    return Sample(drawn[:num_prompt], drawn[num_prompt:])


def image_sample(manifest: Manifest, vision: VisionRecord) -> Sample | None:
    """An image between text, all of it before the boundary; None where the engine has no room for one."""
    image = _draw_image(vision)
    num_tokens = _most_tokens(image, vision)
    num_after = _NUM_BESIDE_IMAGE + manifest.boundary_window
    if _NUM_BESIDE_IMAGE + num_tokens + num_after + NUM_DECODE_STEPS > manifest.limits.max_seq_len:
        return None
    drawn = _draw_tokens(manifest, _NUM_BESIDE_IMAGE + num_after + NUM_DECODE_STEPS)
    text, continuation = drawn[:-NUM_DECODE_STEPS], drawn[-NUM_DECODE_STEPS:]
    marks = vision.placeholders
    placeholder = [token for token in (marks.start, marks.image, marks.end) if token is not None]
    return Sample([*text[:_NUM_BESIDE_IMAGE], *placeholder, *text[_NUM_BESIDE_IMAGE:]], continuation, image)


def _draw_tokens(manifest: Manifest, count: int) -> list[int]:
    """Tokens that stand for themselves."""
    random = np.random.default_rng(0)
    marks = manifest.vision.placeholders if manifest.vision else None
    taken = {marks.image, marks.video, marks.start, marks.end} if marks else set()
    allowed = np.array([token for token in range(manifest.dims.vocab_size) if token not in taken])
    return [int(token) for token in allowed[random.integers(0, len(allowed), count)]]


def _draw_image(vision: VisionRecord) -> Image.Image:
    """Noise of about the fewest pixels that an image is given; of two tiles and their small copy, where it has any."""
    height = vision.fixed_size.image_size if vision.fixed_size else 0
    if vision.patches is not None:
        height = math.ceil(math.sqrt(vision.patches.min_pixels))
    width = int(height * _ASPECT_RATIO)
    if vision.tiles is not None:
        height = vision.tiles.tile_size // _NUM_TILES - 1
        width = height * _NUM_TILES
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _most_tokens(image: Image.Image, vision: VisionRecord) -> int:
    """No fewer tokens than the image makes: each side may be rounded up by one of them. Marks around it included."""
    if vision.fixed_size is not None:
        return vision.fixed_size.tokens_per_image + 2
    if (tiles := vision.tiles) is not None:
        num_tiles = _NUM_TILES if tiles.min_tiles <= _NUM_TILES <= tiles.max_tiles else tiles.max_tiles
        return (num_tiles + 1) * tiles.tokens_per_tile + 2
    assert vision.patches is not None
    side = vision.patches.patch_size * vision.patches.merge_size
    return math.ceil(image.height / side + 1) * math.ceil(image.width / side + 1) + 2
