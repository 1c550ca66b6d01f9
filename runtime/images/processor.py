"""What a family of vision models wants done to an image before its vision graph, and how its prompts show one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.images.loading import Frame, ImageSource

# The text of a token, by its id.
TokenText = Callable[[int], str]


@dataclass(frozen=True)
class PromptImage:
    """One image of a prompt; or of a video, the frames that share one patch of time.

    Only where its pixels are: they are read when its turn comes, so that many images take no memory. `height` and
    `width` are in pixels, as the vision graph sees it; `rows` and `columns` are those of its tokens.
    """

    frames: tuple[Frame, ...]
    height: int
    width: int
    rows: int
    columns: int

    @property
    def num_tokens(self) -> int:
        """How many tokens of the prompt it takes."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ImageText:
    """How a prompt's text shows an image: a placeholder, which becomes prefix, one token for each row, and suffix."""

    placeholder: str
    token: str
    prefix: str = ""
    suffix: str = ""

    def expanded(self, num_tokens: int) -> str:
        """What the placeholder of one image becomes."""
        return self.prefix + self.token * num_tokens + self.suffix


class ImageProcessor(Protocol):
    """The equal of a Hugging Face image processor, and of the prompt half of its processor class."""

    def image(self, source: ImageSource) -> PromptImage:
        """Read an image, check it, and say how large it becomes. Raises UsageError where it cannot be used."""

    def vision_inputs(self, image: PromptImage) -> dict[str, NDArray[np.generic]]:
        """Read an image again and make the vision graph's inputs of it, by their names."""

    def image_text(self, token_text: TokenText) -> ImageText:
        """How prompts of this family show images."""
