"""Videos as Qwen3-VL takes them: pairs of frames, each pair like an image behind its time in seconds."""

import math
from collections.abc import Sequence

import numpy as np

from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import PatchRecord, VideoRecord, VisionRecord
from pop_engine.runtime.images.expansion import Replacement
from pop_engine.runtime.images.patches import check_aspect_ratio, image_of_size
from pop_engine.runtime.images.processor import PromptImage, TokenText
from pop_engine.runtime.images.video import Video, open_video


def video_replacement(video: Video, record: VisionRecord, token_text: TokenText) -> Replacement:
    """What a video's placeholder becomes (Qwen3VLProcessor.replace_video_token). Raises UsageError as read_video."""
    tokens = record.placeholders
    assert record.video is not None
    assert record.patches is not None
    assert tokens.video is not None
    assert tokens.start is not None
    assert tokens.end is not None
    start, token, end = (token_text(token_id) for token_id in (tokens.start, tokens.video, tokens.end))
    timed = read_video(video, record.video, record.patches)
    text = "".join(f"<{seconds:.1f} seconds>{start}{token * image.num_tokens}{end}" for seconds, image in timed)
    return Replacement(text, tuple(image for _, image in timed))


def read_video(video: Video, record: VideoRecord, patches: PatchRecord) -> list[tuple[float, PromptImage]]:
    """The patches of time of a video, with their times in seconds. Raises UsageError where it cannot be used."""
    frames = open_video(video)
    length = patches.temporal_patch_size
    if frames.num_frames < length:
        raise UsageError(f"video {video.path}: {frames.num_frames} frames; expected {length} or more: give it as image")
    indices = sample_frames(frames.num_frames, frames.frame_rate, record)
    check_aspect_ratio(f"video {video.path}", frames.height, frames.width)
    height, width = video_size(len(indices), frames.height, frames.width, patches, record)
    padded = indices + indices[-1:] * (-len(indices) % length)
    taken = frames.take(padded, height, width)
    groups = [tuple(taken[start : start + length]) for start in range(0, len(taken), length)]
    seconds = group_seconds(padded, frames.frame_rate, length)
    return [(time, image_of_size(group, height, width, patches)) for time, group in zip(seconds, groups, strict=True)]


def sample_frames(num_frames: int, frame_rate: float, record: VideoRecord) -> list[int]:
    """Which frames are taken, spread evenly from the first to the last (Qwen3VLVideoProcessor.sample_frames)."""
    count = int(num_frames / frame_rate * record.fps)
    count = min(max(count, record.min_frames), record.max_frames, num_frames)
    return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]


def group_seconds(indices: Sequence[int], frame_rate: float, length: int) -> list[float]:
    """The time of each patch of `length` frames: halfway from its first to its last (HF _calculate_timestamps)."""
    times = [index / frame_rate for index in indices]
    return [(times[start] + times[start + length - 1]) / 2 for start in range(0, len(times), length)]


def video_size(num_frames: int, height: int, width: int, patches: PatchRecord, record: VideoRecord) -> tuple[int, int]:
    """Height and width of every frame (smart_resize of HF video_processing_qwen3_vl): the pixels are the video's."""
    factor, length = patches.patch_size * patches.merge_size, patches.temporal_patch_size
    if height < factor or width < factor:
        grow = max(factor / height, factor / width)
        height, width = int(height * grow), int(width * grow)
    rounded = round(height / factor) * factor, round(width / factor) * factor
    num_pixels = round(num_frames / length) * length * rounded[0] * rounded[1]
    if num_pixels > record.max_pixels:
        shrink = math.sqrt(num_frames * height * width / record.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if num_pixels < record.min_pixels:
        grow = math.sqrt(record.min_pixels / (num_frames * height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded
