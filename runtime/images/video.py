"""Frames of a video: from a folder of images, or from a file where a decoder is installed."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.loading import Frame, load_image, require_pillow

if TYPE_CHECKING:
    import PIL.Image

# What transformers takes where nothing says otherwise.
DEFAULT_FRAME_RATE = 24.0
_FRAME_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".avif"})


@dataclass(frozen=True)
class Video:
    """A video file, or a folder of frames in the order of their names. `frame_rate` is how many make a second there.

    A file says so itself. Raises UsageError where the rate is none.
    """

    path: str | Path
    frame_rate: float = DEFAULT_FRAME_RATE

    def __post_init__(self) -> None:
        if not 0 < self.frame_rate < float("inf"):
            raise UsageError(f"video {self.path}: frame rate {self.frame_rate}: expected a number above 0")


class VideoFrames(Protocol):
    """The frames of an open video."""

    num_frames: int
    frame_rate: float
    height: int
    width: int

    def take(self, indices: Sequence[int], height: int, width: int) -> list[Frame]:
        """These frames, in order; those that are not in a file of their own already at this size in pixels."""


def open_video(video: Video) -> VideoFrames:
    """Look into a video. Raises UsageError where there are no frames, or no decoder for its file."""
    path = Path(video.path)
    if path.is_dir():
        return FolderFrames(path, video.frame_rate)
    if not path.is_file():
        raise UsageError(f"video {path}: no such file or folder; give a video, or a folder of frames")
    return FileFrames(path)


class FolderFrames:
    """See VideoFrames. Frames stay files until their turn comes."""

    def __init__(self, folder: Path, frame_rate: float) -> None:
        self._paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in _FRAME_SUFFIXES)
        if not self._paths:
            raise UsageError(f"video {folder}: no images in it; expected frames such as 0001.png")
        self.num_frames = len(self._paths)
        self.frame_rate = frame_rate
        self.width, self.height = load_image(self._paths[0]).size

    def take(self, indices: Sequence[int], height: int, width: int) -> list[Frame]:
        """See VideoFrames. Raises UsageError for a frame that cannot be read, or that is of another size."""
        for index in sorted(set(indices)):
            size = load_image(self._paths[index]).size
            if size != (self.width, self.height):
                raise UsageError(
                    f"video frame {self._paths[index]}: {size[0]}x{size[1]} pixels, but the first has "
                    f"{self.width}x{self.height}; expected one size"
                )
        return [self._paths[index] for index in indices]


class FileFrames:
    """See VideoFrames. Decoded with PyAV, front to back; what is taken is kept at the size that the model sees."""

    def __init__(self, path: Path) -> None:
        require_pillow()
        self._av = _import_av(path)
        self._path = path
        with closing(self._open()) as container:
            stream = container.streams.video[0]
            rate = stream.average_rate or stream.guessed_rate
            if not rate:
                raise UsageError(f"video {path}: it has no frame rate; give a folder of its frames")
            self.frame_rate = float(rate)
            self.height, self.width = stream.codec_context.height, stream.codec_context.width
            # Some containers do not count their frames.
            self.num_frames = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        if not self.num_frames or not self.height or not self.width:
            raise UsageError(f"video {path}: no frames in it; give another file")

    def take(self, indices: Sequence[int], height: int, width: int) -> list[Frame]:
        """See VideoFrames. Raises UsageError where the file ends before its last frame."""
        taken: dict[int, PIL.Image.Image] = {}
        wanted = set(indices)
        try:
            with closing(self._open()) as container:
                for index, frame in enumerate(container.decode(video=0)):
                    if index in wanted:
                        taken[index] = frame.to_image().resize((width, height), _BICUBIC)
                    if len(taken) == len(wanted):
                        break
        except self._av.FFmpegError as error:
            raise UsageError(f"video {self._path}: damaged or cut off ({error.strerror}); save it again") from error
        if len(taken) < len(wanted):
            raise UsageError(f"video {self._path}: ends before frame {max(wanted)}; save it again")
        return [taken[index] for index in indices]

    def _open(self) -> Any:
        try:
            container = self._av.open(str(self._path))
        except (self._av.FFmpegError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"video {self._path}: not a readable video ({reason}); give another file") from error
        if not container.streams.video:
            container.close()
            raise UsageError(f"video {self._path}: it holds no pictures; give another file")
        return container


_BICUBIC = 3


def _import_av(path: Path) -> Any:
    try:
        import av
    except ImportError as error:
        raise UsageError(
            f"video {path}: no decoder is installed; `pip install pop-engine[video]`, or give a folder of its frames"
        ) from error
    return av
