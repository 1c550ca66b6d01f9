"""Images of every kind that people have, and those that cannot be read."""

import base64
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.loading import MAX_PIXELS, load_image

# Four by three, every pixel another colour; values that no conversion may round differently.
COLOURS = np.random.default_rng(0).integers(0, 256, (3, 4, 3), np.uint8)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def pixels(content: bytes) -> NDArray[np.uint8]:
    image = load_image(content)
    assert image.mode == "RGB"
    return np.asarray(image)


def png_of_size(width: int, height: int) -> bytes:
    """A well-formed PNG header of any size, and no more pixels than fit a few bytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_formats(image_format: str) -> None:
    options = {"lossless": True} if image_format == "WEBP" else {}
    assert (pixels(encoded(Image.fromarray(COLOURS), image_format, **options)) == COLOURS).all()


def test_paths_bytes_and_data_urls_are_the_same(tmp_path: Path) -> None:
    content = encoded(Image.fromarray(COLOURS))
    path = tmp_path / "a.png"
    path.write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    for source in (content, path, str(path), url):
        assert (np.asarray(load_image(source)) == COLOURS).all()


def test_grey_is_every_channel() -> None:
    grey = COLOURS[..., 0]
    assert (pixels(encoded(Image.fromarray(grey))) == grey[..., None]).all()


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_16_bit_samples_keep_their_range(image_format: str) -> None:
    """65535 is white: 257 steps of 16 bits make one of 8, and 128 more round up."""
    grey = COLOURS[..., 0]
    for offset, step in ((0, 0), (128, 0), (129, 1)):
        deep = np.minimum(grey.astype(np.uint16) * 257 + offset, 65535)
        expected = np.minimum(grey.astype(int) + step, 255)
        assert (pixels(encoded(Image.fromarray(deep), image_format)) == expected[..., None]).all()


def test_cmyk_is_converted() -> None:
    # No cyan is full red, all black is black: the definition of the four inks.
    inks = np.array([[[0, 255, 255, 0], [255, 0, 255, 0], [0, 0, 0, 0], [0, 0, 0, 255]]], np.uint8)
    found = pixels(encoded(Image.fromarray(inks, "CMYK"), "TIFF"))
    assert found.tolist() == [[[255, 0, 0], [0, 255, 0], [255, 255, 255], [0, 0, 0]]]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(mode: str) -> None:
    """As transformers' convert_to_rgb: whatever colour lies under full transparency is not seen."""
    image = Image.new("RGBA", (2, 1), (9, 9, 9, 255))
    image.putpixel((1, 0), (9, 9, 9, 0))
    content = encoded(image.quantize() if mode == "P" else image.convert(mode))
    assert Image.open(io.BytesIO(content)).mode == mode
    assert pixels(content).tolist() == [[[9, 9, 9], [255, 255, 255]]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation: int) -> None:
    """The EXIF standard's table: which stored corner is the visual top left, and which way rows run."""
    stored = {
        1: COLOURS,
        2: COLOURS[:, ::-1],
        3: COLOURS[::-1, ::-1],
        4: COLOURS[::-1],
        5: COLOURS.transpose(1, 0, 2),
        6: COLOURS.transpose(1, 0, 2)[::-1],
        7: COLOURS.transpose(1, 0, 2)[::-1, ::-1],
        8: COLOURS.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (pixels(encoded(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)) == COLOURS).all()


@pytest.mark.parametrize("image_format", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(image_format: str) -> None:
    frames = [Image.new("RGB", (4, 3), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    options: dict[str, Any] = {"save_all": True, "append_images": frames[1:]}
    content = encoded(frames[0], image_format, **options, **({"lossless": True} if image_format == "WEBP" else {}))
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == 2
    assert (pixels(content) == (255, 0, 0)).all()


def test_one_pixel() -> None:
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (
        "nowhere.png",
        r"image nowhere\.png: cannot be read \(No such file or directory\); give the path of an",
    ),
    "folder": (".", r"image \.: cannot be read \(Is a directory\)"),
    "null byte": ("a\0b", r"cannot be read \(embedded null byte\)"),
    "no bytes": (b"", r"image of 0 bytes: empty; expected an image file"),
    "text": (b"hello, I am no image", r"image of 20 bytes: not an image that can be read; expected one of PNG, JPEG"),
    "program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", r"not an image that can be read"),
    "giant": (png_of_size(60_000, 60_000), rf"expected at most {MAX_PIXELS:,} pixels: scale it down"),
    "large": (png_of_size(9_200, 9_200), r"9200x9200 pixels; expected at most"),
    "no width": (png_of_size(0, 5), r"not an image that can be read|0x5 pixels"),
    "few pixels": (png_of_size(500, 500), r"the image is damaged or cut off"),
    "web address": ("https://host/a.png", r"the engine downloads nothing; save the image and give its path"),
    "data URL of text": ("data:text/plain,hello", r"expected data:image/png;base64,"),
    "damaged base64": ("data:image/png;base64,AAA", r"its base64 is damaged"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_named(kind: str) -> None:
    source, message = BROKEN[kind]
    with pytest.raises(UsageError, match=message) as caught:
        load_image(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_truncated_images_are_named(image_format: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    content = encoded(Image.fromarray(noise), image_format)
    for share in (0.02, 0.5, 0.9):
        with pytest.raises(UsageError, match=r"^image of \d+ bytes: (the image is damaged|not an image)"):
            load_image(content[: int(len(content) * share)])


def test_32_bit_samples_are_refused() -> None:
    with pytest.raises(UsageError, match=r"32-bit samples, whose range is unknown; save it with 8 or 16 bits"):
        load_image(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF"))


def test_without_pillow_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "from pop_engine.runtime.images.loading import load_image\n"
        "from pop_engine.configs.errors import exit_with_message\n"
        "sys.exit(exit_with_message('pop-run', lambda: load_image(b'x')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "pop-run: error: images: Pillow is not installed; install it with `pip install pop-engine[images]`\n"
    )
