"""An image from a file, a data URL or bytes: upright, RGB, and refused with a reason where it cannot be read."""

import base64
import binascii
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np

from pop_engine.configs.errors import UsageError

if TYPE_CHECKING:
    import PIL.Image

# A path, a data URL, or a file's bytes.
ImageSource = str | Path | bytes
# What may also be a decoded frame of a video.
Frame = Union[ImageSource, "PIL.Image.Image"]

# Formats by Pillow's names. Not all that it knows: some start other programs (EPS), and prompts come from strangers.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
# About 9,000 pixels square, a quarter of a gigabyte once decoded. A small file can claim any size.
MAX_PIXELS = 2**26 + 2**24
_SHOWN_LEN = 60
_WHITE = (255, 255, 255, 255)
# A 16-bit sample in 8 bits: 65535 / 257 is 255.
_PER_8_BIT_STEP = 257


def load_image(source: Frame) -> "PIL.Image.Image":
    """Read an image: the first frame of an animated one, turned as its EXIF tag says, transparent parts on white.

    Raises UsageError where it is missing, damaged, of no known format, empty, or above MAX_PIXELS.
    """
    require_pillow()
    if not isinstance(source, str | Path | bytes):
        return source
    shown = show_source(source)
    image = _open(_read(source, shown), shown)
    if image.width < 1 or image.height < 1:
        raise UsageError(f"{shown}: {image.width}x{image.height} pixels; expected at least one")
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(shown, f"{image.width}x{image.height} pixels")
    try:
        return _to_rgb(_upright(image), shown, has_16_bits=_has_16_bits(image))
    except UsageError:
        raise
    except Exception as error:  # On damaged files the decoders raise anything.
        raise UsageError(f"{shown}: the image is damaged or cut off ({error}); save it again") from error


def require_pillow() -> None:
    """Raise UsageError where Pillow is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("images: Pillow is not installed; install it with `pip install pop-engine[images]`") from error


def show_source(source: ImageSource) -> str:
    """How messages name an image."""
    if isinstance(source, bytes):
        return f"image of {len(source)} bytes"
    text = str(source)
    return f"image {text if len(text) <= _SHOWN_LEN else text[:_SHOWN_LEN] + '…'}"


def _read(source: ImageSource, shown: str) -> bytes:
    if isinstance(source, str) and source.startswith("data:"):
        content = _decode_data_url(source, shown)
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        raise UsageError(f"{shown}: the engine downloads nothing; save the image and give its path, or a data: URL")
    elif isinstance(source, bytes):
        content = source
    else:
        content = _read_file(Path(source), shown)
    if not content:
        raise UsageError(f"{shown}: empty; expected an image file")
    return content


def _read_file(path: Path, shown: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte.
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown}: cannot be read ({reason}); give the path of an image file") from error


def _decode_data_url(url: str, shown: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise UsageError(f"{shown}: expected data:image/png;base64,… or the like")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error as error:
        raise UsageError(f"{shown}: its base64 is damaged ({error})") from error


def _open(content: bytes, shown: str) -> "PIL.Image.Image":
    from PIL import Image

    try:
        with warnings.catch_warnings():
            # Pillow warns of sizes that we refuse below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(content), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_large(shown, f"too many pixels ({error})") from error
    except Exception as error:
        expected = ", ".join(FORMATS)
        raise UsageError(f"{shown}: not an image that can be read; expected one of {expected}") from error


def _too_large(shown: str, found: str) -> UsageError:
    return UsageError(f"{shown}: {found}; expected at most {MAX_PIXELS:,} pixels: scale it down")


def _upright(image: "PIL.Image.Image") -> "PIL.Image.Image":
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def _has_16_bits(image: "PIL.Image.Image") -> bool:
    # Pillow scales a PPM file's samples to 16 bits, and keeps them in 32.
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")


def _to_rgb(image: "PIL.Image.Image", shown: str, *, has_16_bits: bool) -> "PIL.Image.Image":
    """As Hugging Face's image processors convert, but for samples of 16 bits, which Pillow would cut at 255."""
    from PIL import Image

    if has_16_bits:
        samples = np.asarray(image).astype(np.float64) / _PER_8_BIT_STEP
        return Image.fromarray(np.round(samples).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise UsageError(f"{shown}: 32-bit samples, whose range is unknown; save it with 8 or 16 bits")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")
