"""An engine's images: what a prompt shows for each, and the rows of features of its tokens."""

from collections.abc import Sequence
from pathlib import Path

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.vision import VisionRecord
from pop_engine.runtime.images.expansion import Replacement, expand_placeholders
from pop_engine.runtime.images.internvl import InternVLProcessor
from pop_engine.runtime.images.loading import ImageSource
from pop_engine.runtime.images.processor import ImageProcessor, PromptImage, TokenText
from pop_engine.runtime.images.prompt import ImagePrompt, place_images
from pop_engine.runtime.images.qwen_video import video_replacement
from pop_engine.runtime.images.qwen_vl import QwenVLProcessor
from pop_engine.runtime.images.siglip import SiglipProcessor
from pop_engine.runtime.images.video import Video
from pop_engine.runtime.images.vision_session import ImageFeatures, VisionSession


class Vision:
    """The vision half of an engine. Its graph is loaded with the first image: text alone does not pay for it."""

    def __init__(self, directory: Path, weights: Path, manifest: Manifest, threads: int | None) -> None:
        assert manifest.vision is not None
        self._record = manifest.vision
        self._processor = _processor(directory, self._record)
        self._directory, self._weights, self._threads = directory, weights, threads
        self._session: VisionSession | None = None
        self.inputs = self._record.inputs
        placeholders = self._record.placeholders
        self._image_token_ids = frozenset(
            token for token in (placeholders.image, placeholders.video) if token is not None
        )

    @property
    def keeps_images_whole(self) -> bool:
        """Whether an image's tokens see each other, so that one call must take them all."""
        return self._record.image_attention == "bidirectional"

    def expand(
        self, text: str, token_text: TokenText, images: Sequence[ImageSource], videos: Sequence[Video]
    ) -> tuple[str, tuple[PromptImage, ...]]:
        """A prompt's text with the placeholders replaced by tokens, and the images that these stand for.

        Raises UsageError for images and videos that cannot be read, and for more or fewer than placeholders.
        """
        image_text = self._processor.image_text(token_text)
        read = [self._processor.image(source) for source in images]
        given = {image_text.placeholder: [Replacement(image_text.expanded(r.num_tokens), (r,)) for r in read]}
        if self._record.video is not None and self._record.placeholders.video is not None:
            shown = token_text(self._record.placeholders.video)
            given[shown] = [video_replacement(video, self._record, token_text) for video in videos]
        elif videos:
            raise UsageError(f"video {videos[0].path}: this model takes images, but no videos; give frames as images")
        return expand_placeholders(text, given)

    def place(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> ImagePrompt:
        """Token ids with their images. Each has one token there, which is repeated, or all of them already.

        Raises UsageError for any other number.
        """
        return place_images(token_ids, images, self._image_token_ids)

    def read(self, images: Sequence[ImageSource]) -> list[PromptImage]:
        """Images, read and checked. Raises UsageError for those that cannot be used."""
        return [self._processor.image(source) for source in images]

    def features(self, image: PromptImage) -> ImageFeatures:
        """Run one image through the vision graph."""
        if self._session is None:
            self._session = VisionSession(self._directory, self._weights, self._record.graph, self._threads)
        return self._session.run(self._processor.vision_inputs(image))

    def close(self) -> None:
        """Give up the vision graph."""
        self._session = None


def _processor(directory: Path, record: VisionRecord) -> ImageProcessor:
    if record.processor == "qwen-vl" and record.patches is not None:
        return QwenVLProcessor(record.patches, record.pixels, record.placeholders)
    if record.processor == "siglip" and record.fixed_size is not None:
        return SiglipProcessor(record.fixed_size, record.pixels, record.placeholders)
    if record.processor == "internvl" and record.tiles is not None:
        return InternVLProcessor(record.tiles, record.pixels, record.placeholders)
    raise EngineError(f"{directory}: image processor {record.processor} lacks its sizes; build the engine again")
