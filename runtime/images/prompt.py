"""A prompt's token ids, and which of them are images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.processor import PromptImage


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the place of its first token in the prompt."""

    start: int
    image: PromptImage

    @property
    def stop(self) -> int:
        """The place behind its last token."""
        return self.start + self.image.num_tokens


@dataclass(frozen=True)
class ImagePrompt(Sequence[int]):
    """Token ids that know which of them are images. To everything that takes token ids it is a list of them."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


def place_images(
    token_ids: Sequence[int], images: Sequence[PromptImage], image_token_ids: frozenset[int]
) -> ImagePrompt:
    """Find each image's tokens: the next ones that stand for images, in one piece.

    Where there is one for each image it is repeated. Raises UsageError for any other number than the images take.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id in image_token_ids]
    if len(places) == len(images):
        token_ids = _repeat(token_ids, dict(zip(places, images, strict=True)))
        places = [place for place, token_id in enumerate(token_ids) if token_id in image_token_ids]
    expected = sum(image.num_tokens for image in images)
    if len(places) != expected:
        raise UsageError(
            f"prompt: it has {len(places)} image tokens, but its {len(images)} images take {expected}; "
            "leave the placeholders to the chat template, or write one where each image belongs"
        )
    placed: list[PlacedImage] = []
    taken = 0
    for image in images:
        start, last = places[taken], places[taken + image.num_tokens - 1]
        if last - start + 1 != image.num_tokens:
            raise UsageError(f"prompt: the {image.num_tokens} tokens of an image at token {start} are not in one piece")
        placed.append(PlacedImage(start, image))
        taken += image.num_tokens
    return ImagePrompt(tuple(token_ids), tuple(placed))


def _repeat(token_ids: Sequence[int], images: Mapping[int, PromptImage]) -> list[int]:
    """The ids with the token at each image's place as often as the image has tokens."""
    counts = {place: image.num_tokens for place, image in images.items()}
    return [token_id for place, token_id in enumerate(token_ids) for _ in range(counts.get(place, 1))]
