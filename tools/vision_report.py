"""What an engine takes beside text, in words."""

from collections.abc import Iterator

from pop_engine.configs.vision import FixedSizeRecord, PatchRecord, TileRecord, VideoRecord, VisionRecord


def vision_lines(record: VisionRecord | None) -> Iterator[str]:
    """Sizes of images and videos, how the text graphs take them; nothing for a text model."""
    if record is None:
        return
    sizes = [_patch_line(record.patches)] if record.patches else []
    sizes += [_fixed_line(record.fixed_size)] if record.fixed_size else []
    sizes += [_tile_line(record.tiles)] if record.tiles else []
    yield f"{record.processor}: {', '.join(sizes)}"
    positions = {"mrope": "three positions a token (time, row, column)", "text": "one position a token"}
    attention = {
        "causal": "causal",
        "bidirectional": "both ways within an image, which stays in one chunk",
    }
    deepstack = f"; {record.inputs.num_deepstack} DeepStack layers" if record.inputs.num_deepstack else ""
    yield f"{positions[record.inputs.positions]}; attention {attention[record.image_attention]}{deepstack}"
    if record.video is not None:
        yield _video_line(record.video)


def _patch_line(patches: PatchRecord) -> str:
    side = patches.patch_size * patches.merge_size
    return f"any size, {patches.min_pixels} to {patches.max_pixels} pixels, one token for {side}x{side}"


def _fixed_line(size: FixedSizeRecord) -> str:
    return f"{size.image_size}x{size.image_size} pixels, {size.tokens_per_image} tokens each"


def _tile_line(tiles: TileRecord) -> str:
    most = f" and the whole image as one more, {tiles.tokens_per_tile} tokens each"
    return f"{tiles.min_tiles} to {tiles.max_tiles} tiles of {tiles.tile_size}x{tiles.tile_size} pixels{most}"


def _video_line(video: VideoRecord) -> str:
    return (
        f"videos: {video.fps:g} frames a second, {video.min_frames} to {video.max_frames} of them, "
        f"{video.min_pixels} to {video.max_pixels} pixels together"
    )
