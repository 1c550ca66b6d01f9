"""A prompt as its chunks need it: where it may be cut, and what images add to each piece."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.positions import mrope_positions
from pop_engine.runtime.images.prompt import ImagePrompt, PlacedImage
from pop_engine.runtime.images.vision import Vision
from pop_engine.runtime.images.vision_session import ImageFeatures
from pop_engine.runtime.sessions.session import ImageRows


class PromptRows:
    """The rows of a prompt. Images are run as their chunk comes, one at a time; `token_ids` are [rows].

    `next_position` is where the text after it goes on: not its length where an image's tokens share positions.
    """

    def __init__(self, prompt: Sequence[int], vision: Vision | None, first_position: int) -> None:
        self.token_ids = np.array(list(prompt), np.int64)
        self._vision = vision
        self._images = prompt.images if isinstance(prompt, ImagePrompt) else ()
        self._whole = self._images if vision is not None and vision.keeps_images_whole else ()
        self._held: tuple[PlacedImage, ImageFeatures] | None = None
        self._positions: NDArray[np.int64] | None = None
        self.next_position = first_position + len(prompt)
        if vision is not None and vision.inputs.positions == "mrope":
            self._positions, self.next_position = mrope_positions(len(prompt), self._images, first_position)

    def cut_before(self, place: int) -> int:
        """The last place up to here where the prompt may be cut: an image whose tokens see each other stays whole."""
        return next((placed.start for placed in self._whole if placed.start < place < placed.stop), place)

    def chunks(self, start: int, stop: int, max_len: int) -> list[slice]:
        """The rows from `start` to `stop`, in pieces of at most `max_len`."""
        chunks: list[slice] = []
        while start < stop:
            end = min(start + max_len, stop)
            end = end if end == stop else self.cut_before(end)
            if end <= start:
                raise UsageError(
                    f"image at token {start}: its tokens must go in one chunk, of at most {max_len} tokens here; "
                    "build with a higher --max-prefill-len"
                )
            chunks.append(slice(start, end))
            start = end
        return chunks

    def image_rows(self, chunk: slice) -> ImageRows | None:
        """What the chunk takes beside its tokens; none where it is text with plain positions."""
        positions = None if self._positions is None else self._positions[:, None, chunk]
        inside = [(k, p) for k, p in enumerate(self._images, 1) if p.start < chunk.stop and p.stop > chunk.start]
        if not inside:
            return None if positions is None else ImageRows(positions)
        assert self._vision is not None
        num_rows, inputs = chunk.stop - chunk.start, self._vision.inputs
        ids = np.zeros((1, num_rows), np.int64)
        embeds = np.zeros((1, num_rows, inputs.hidden_size), np.float32)
        deepstack = np.zeros((inputs.num_deepstack, 1, num_rows, inputs.hidden_size), np.float32)
        for number, placed in inside:
            features = self._features(placed)
            first, stop = max(placed.start, chunk.start), min(placed.stop, chunk.stop)
            rows, taken = (
                slice(first - chunk.start, stop - chunk.start),
                slice(first - placed.start, stop - placed.start),
            )
            ids[0, rows] = number
            embeds[0, rows] = features.embeds[taken]
            if features.deepstack is not None:
                deepstack[:, 0, rows] = features.deepstack[:, taken]
        return ImageRows(positions, ids, embeds, deepstack)

    def _features(self, placed: PlacedImage) -> ImageFeatures:
        """An image's features, kept for its next chunk alone."""
        if self._held is None or self._held[0] is not placed:
            assert self._vision is not None
            # The last image's features go before the next one's come.
            self._held = None
            self._held = (placed, self._vision.features(placed.image))
        return self._held[1]
