"""What an engine needs to know to take images: how they become tensors, and how the text graphs take those."""

from dataclasses import dataclass, fields
from typing import Literal

from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import ImageInputs

VISION_GRAPH = "vision.onnx"

ProcessorName = Literal["internvl", "qwen-vl", "siglip"]
ImageAttention = Literal["causal", "bidirectional"]


@dataclass(frozen=True)
class PixelRecord:
    """From an RGB image to numbers, under the names of Hugging Face's image processors.

    `resample` is Pillow's number of a filter. A step that the processor leaves out is neutral here: a factor of 1,
    means of 0 and deviations of 1.
    """

    resample: int
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]


@dataclass(frozen=True)
class PatchRecord:
    """Images of any size, cut into patches (Hugging Face's Qwen2VLImageProcessor).

    A side is a multiple of `patch_size * merge_size` pixels, an image has `min_pixels` to `max_pixels` of them, and
    `merge_size` squared patches make one token. `num_grid_per_side` is the side of the learned table of positions,
    0 where the vision tower has none.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    num_grid_per_side: int


@dataclass(frozen=True)
class FixedSizeRecord:
    """Images of one size, `image_size` pixels square, that always make `tokens_per_image` tokens."""

    image_size: int
    tokens_per_image: int


@dataclass(frozen=True)
class TileRecord:
    """Images of any size, cut into square tiles (Hugging Face's GotOcr2ImageProcessor with crop_to_patches).

    Each is `tile_size` pixels square and makes `tokens_per_tile` tokens. An image has `min_tiles` to `max_tiles`, and
    where they are several one more: the whole image in small.
    """

    tile_size: int
    tokens_per_tile: int
    min_tiles: int
    max_tiles: int


@dataclass(frozen=True)
class VideoRecord:
    """Which frames are taken of a video, and how large they may be (Hugging Face's Qwen3VLVideoProcessor).

    `fps` frames a second, from `min_frames` to `max_frames`. The pixels are those of all frames together.
    """

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True)
class PlaceholderRecord:
    """The tokens that stand for images. The first is repeated, once for each of an image's tokens.

    `start` and `end` enclose an image in a prompt, where the family has such tokens. `video` stands for a video's
    frames, where the model takes any.
    """

    image: int
    start: int | None = None
    end: int | None = None
    video: int | None = None


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """How a model takes images; `inputs` is what its text graphs get, `video` is there where it takes videos too.

    `patches`, `fixed_size` or `tiles` is there, as `processor` asks. With `bidirectional` attention the tokens of one
    image see each other, so that no chunk of a prompt may part them.
    """

    inputs: ImageInputs
    processor: ProcessorName
    placeholders: PlaceholderRecord
    pixels: PixelRecord
    image_attention: ImageAttention
    patches: PatchRecord | None = None
    fixed_size: FixedSizeRecord | None = None
    tiles: TileRecord | None = None
    video: VideoRecord | None = None


@dataclass(frozen=True, kw_only=True)
class VisionRecord(ImageFacts):
    """The vision half of an engine: these facts, its graph, and the processor's files in the engine directory."""

    graph: GraphRecord
    processor_files: tuple[str, ...] = ()

    @classmethod
    def of(cls, facts: ImageFacts, graph: GraphRecord, processor_files: tuple[str, ...]) -> "VisionRecord":
        """The facts that were known before there was a graph, with it."""
        known = {field.name: getattr(facts, field.name) for field in fields(facts)}
        return cls(graph=graph, processor_files=processor_files, **known)
