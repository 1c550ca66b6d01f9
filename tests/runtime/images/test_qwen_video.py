"""Videos against transformers' Qwen3-VL classes: which frames, how large, when; and what is refused."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as hf_smart_resize
from transformers.video_utils import VideoMetadata

from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import PIXEL_VALUES
from pop_engine.configs.vision import PatchRecord, PixelRecord, PlaceholderRecord, VideoRecord
from pop_engine.runtime.images.qwen_video import group_seconds, read_video, sample_frames, video_size
from pop_engine.runtime.images.qwen_vl import QwenVLProcessor
from pop_engine.runtime.images.video import Video
from vision_engine_kit import save_frames

RECORD = VideoRecord(fps=2, min_frames=4, max_frames=20, min_pixels=4096, max_pixels=60_000)
PATCHES = PatchRecord(8, 2, 2, min_pixels=1024, max_pixels=8192, num_grid_per_side=4)
PIXELS = PixelRecord(3, 1 / 255, (0.5, 0.45, 0.4), (0.5, 0.25, 0.2))


@pytest.mark.parametrize("rate", [24.0, 29.97, 10.0, 2.0, 1.0])
@pytest.mark.parametrize("count", [2, 3, 4, 25, 100, 401])
def test_frames_and_times_equal_transformers(count: int, rate: float) -> None:
    processor: Any = SimpleNamespace(fps=RECORD.fps, min_frames=RECORD.min_frames, max_frames=RECORD.max_frames)
    metadata = VideoMetadata(total_num_frames=count, fps=rate)
    expected = Qwen3VLVideoProcessor.sample_frames(processor, metadata).tolist()
    indices = sample_frames(count, rate, RECORD)
    assert indices == expected
    padded = indices + indices[-1:] * (len(indices) % 2)
    times = Qwen3VLProcessor._calculate_timestamps(processor, list(expected), rate, 2)
    assert group_seconds(padded, rate, 2) == times


def test_sizes_equal_transformers_over_many_shapes() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        height, width = (int(side) for side in random.integers(5, 600, 2))
        count = int(random.integers(2, 40))
        expected = hf_smart_resize(count, height, width, 2, 16, RECORD.min_pixels, RECORD.max_pixels)
        assert video_size(count, height, width, PATCHES, RECORD) == expected


def test_patches_equal_transformers(tmp_path: Path) -> None:
    """Four frames of a size that needs no resizing, in which transformers would use torchvision."""
    frames = save_frames(tmp_path / "clip", 4)
    record = VideoRecord(fps=24, min_frames=4, max_frames=20, min_pixels=64, max_pixels=60_000)
    groups = read_video(Video(tmp_path / "clip"), record, PATCHES)
    assert [seconds for seconds, _ in groups] == pytest.approx([0.5 / 24, 2.5 / 24])
    processor = QwenVLProcessor(PATCHES, PIXELS, PlaceholderRecord(5))
    found = np.concatenate([processor.vision_inputs(image)[PIXEL_VALUES] for _, image in groups])
    mean, std = (torch.tensor(values)[:, None, None] for values in (PIXELS.image_mean, PIXELS.image_std))
    pixels = (torch.tensor(np.stack(frames)).permute(0, 3, 1, 2) / 255 - mean) / std
    helper: Any = None
    patchified: Any = Qwen3VLVideoProcessor.patchify(helper, pixels[None], 8, 2, 2)
    expected, grid_t, grid_h, grid_w = patchified
    assert (grid_t, grid_h, grid_w) == (2, groups[0][1].rows * 2, groups[0][1].columns * 2)
    assert np.abs(found - expected[0].numpy()).max() < 1e-6


def test_an_odd_number_of_frames_repeats_the_last(tmp_path: Path) -> None:
    save_frames(tmp_path, 3)
    groups = read_video(Video(tmp_path, frame_rate=2), RECORD, PATCHES)
    assert [[Path(str(frame)).name for frame in image.frames] for _, image in groups] == [
        ["0000.png", "0001.png"],
        ["0002.png", "0002.png"],
    ]
    assert [seconds for seconds, _ in groups] == [0.25, 1.0]


REFUSED: dict[str, tuple[Any, str]] = {
    "missing": (lambda folder: folder / "no", "no such file or folder; give a video, or a folder of frames"),
    "no images": (lambda folder: folder, "no images in it; expected frames such as 0001.png"),
    "one frame": (lambda folder: save_frames(folder, 1) and folder, "1 frames; expected 2 or more: give it as image"),
    "wide": (
        lambda folder: save_frames(folder, 2, (402, 2)) and folder,
        "402x2 pixels; expected an aspect ratio of at",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        read_video(Video(make(tmp_path)), RECORD, PATCHES)


def test_frames_of_two_sizes(tmp_path: Path) -> None:
    save_frames(tmp_path, 4)
    Image.new("RGB", (48, 33)).save(tmp_path / "0002.png")
    with pytest.raises(UsageError, match=r"0002\.png: 48x33 pixels, but the first has 48x32; expected one size"):
        read_video(Video(tmp_path), RECORD, PATCHES)


def test_a_file_without_a_decoder(tmp_path: Path) -> None:
    """PyAV is an extra of its own; the test does not depend on whether it is here."""
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"\0" * 100)
    code = (
        "import sys; sys.modules['av'] = None\n"
        "from pathlib import Path\n"
        "from pop_engine.runtime.images.video import Video, open_video\n"
        "from pop_engine.configs.errors import exit_with_message\n"
        "sys.exit(exit_with_message('pop-run', lambda: open_video(Video('clip.mp4'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "pop-run: error: video clip.mp4: no decoder is installed; `pip install pop-engine[video]`, "
        "or give a folder of its frames\n"
    )


def test_a_file_that_is_no_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"\0" * 100)
    with pytest.raises(UsageError, match=r"clip\.mp4: not a readable video"):
        read_video(Video(clip), RECORD, PATCHES)


def test_a_file_gives_the_frames_of_its_folder(tmp_path: Path) -> None:
    """A lossless clip, decoded, is the frames that it was made of."""
    av = pytest.importorskip("av")
    frames = save_frames(tmp_path / "frames", 30)
    with av.open(str(tmp_path / "clip.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "bgr0"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="bgr0")))
        container.mux(stream.encode(None))
    processor = QwenVLProcessor(PATCHES, PIXELS, PlaceholderRecord(5))
    from_file = read_video(Video(tmp_path / "clip.mkv"), RECORD, PATCHES)
    from_folder = read_video(Video(tmp_path / "frames", frame_rate=10), RECORD, PATCHES)
    assert [seconds for seconds, _ in from_file] == [seconds for seconds, _ in from_folder]
    for (_, found), (_, expected) in zip(from_file, from_folder, strict=True):
        assert (found.rows, found.columns) == (expected.rows, expected.columns)
        first, second = (processor.vision_inputs(image)[PIXEL_VALUES] for image in (found, expected))
        assert np.array_equal(first, second)
