"""What pop-inspect says of images."""

from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import GraphContract, ImageInputs
from pop_engine.configs.vision import (
    FixedSizeRecord,
    PatchRecord,
    PixelRecord,
    PlaceholderRecord,
    TileRecord,
    VideoRecord,
    VisionRecord,
)
from pop_engine.tools.vision_report import vision_lines

GRAPH = GraphRecord("vision.onnx", GraphContract((), ()), {})
PIXELS = PixelRecord(3, 1 / 255, (0.5,) * 3, (0.5,) * 3)


def test_a_text_model_has_no_lines() -> None:
    assert list(vision_lines(None)) == []


def test_images_of_any_size_and_videos() -> None:
    record = VisionRecord(
        inputs=ImageInputs(64, 3, "mrope"),
        processor="qwen-vl",
        placeholders=PlaceholderRecord(1),
        pixels=PIXELS,
        image_attention="causal",
        patches=PatchRecord(16, 2, 2, 65_536, 16_777_216, 48),
        video=VideoRecord(2, 4, 768, 4096, 25_165_824),
        graph=GRAPH,
    )
    assert list(vision_lines(record)) == [
        "qwen-vl: any size, 65536 to 16777216 pixels, one token for 32x32",
        "three positions a token (time, row, column); attention causal; 3 DeepStack layers",
        "videos: 2 frames a second, 4 to 768 of them, 4096 to 25165824 pixels together",
    ]


def test_square_images() -> None:
    record = VisionRecord(
        inputs=ImageInputs(64, 0, "text"),
        processor="siglip",
        placeholders=PlaceholderRecord(1, 2, 3),
        pixels=PIXELS,
        image_attention="bidirectional",
        fixed_size=FixedSizeRecord(896, 256),
        graph=GRAPH,
    )
    assert list(vision_lines(record)) == [
        "siglip: 896x896 pixels, 256 tokens each",
        "one position a token; attention both ways within an image, which stays in one chunk",
    ]


def test_tiles() -> None:
    record = VisionRecord(
        inputs=ImageInputs(64, 0, "text"),
        processor="internvl",
        placeholders=PlaceholderRecord(1),
        pixels=PIXELS,
        image_attention="causal",
        tiles=TileRecord(448, 256, 1, 12),
        graph=GRAPH,
    )
    assert list(vision_lines(record)) == [
        "internvl: 1 to 12 tiles of 448x448 pixels and the whole image as one more, 256 tokens each",
        "one position a token; attention causal",
    ]
