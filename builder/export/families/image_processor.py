"""What the families' files share about Hugging Face's image processors: reading one, its facts, its placeholders."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import PixelRecord

# A processor of its own kind is in the first, or all of a model's are in the second.
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")
VIDEO_FILES = ("video_preprocessor_config.json", "processor_config.json")


def read_processor(
    processor_class: Any, folder: Path | None, files: Sequence[str] = IMAGE_FILES, kind: str = "image"
) -> Any:
    """The processor of a checkpoint's folder; None where it has no file of one. Raises UsageError for a damaged one."""
    if folder is None or not any((folder / name).is_file() for name in files):
        return None
    try:
        return processor_class.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{folder}: its {kind} processor cannot be read ({reason(error)})") from error


def square_processor(processor_class: Any, folder: Path | None, side: int) -> Any:
    """The processor of a folder, or of the class's defaults, at the size of a vision tower for squares.

    Raises UsageError where a file is damaged or of another size.
    """
    processor = read_processor(processor_class, folder)
    if processor is None:
        return processor_class(size={"height": side, "width": side})
    height, width = processor.size.height, processor.size.width
    if (height, width) != (side, side):
        raise UsageError(
            f"{folder}: its image processor has size {height}x{width}, its vision tower {side}x{side}; "
            "the two are not of the same model"
        )
    return processor


def pixel_record(processor: Any) -> PixelRecord:
    """Steps from pixels to numbers; those that are off are neutral."""
    channels = len(processor.image_mean)
    return PixelRecord(
        resample=int(processor.resample),
        rescale_factor=float(processor.rescale_factor) if processor.do_rescale else 1.0,
        image_mean=tuple(map(float, processor.image_mean)) if processor.do_normalize else (0.0,) * channels,
        image_std=tuple(map(float, processor.image_std)) if processor.do_normalize else (1.0,) * channels,
    )


def expand_placeholders(token_ids: Sequence[int], placeholder: int, num_tokens: Iterable[int]) -> torch.Tensor:
    """Token ids [1, N] in which each image's placeholder stands as often as the image has tokens."""
    counts = iter(num_tokens)
    expanded = [token_id for given in token_ids for token_id in [given] * (next(counts) if given == placeholder else 1)]
    return torch.tensor([expanded])
