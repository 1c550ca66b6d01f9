"""Images in prompts, end to end: the engine's greedy tokens are those of Hugging Face's generate."""

import base64
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers.video_utils import VideoMetadata

from engine_kit import EngineKit, chunks_of, relative_error, taken_slots
from image_kit import END, IMAGE, SIZES, START, VIDEO, Prompt, hf_greedy, load_hf_model, make_prompt, random_image
from pop_engine.configs import io_contract
from pop_engine.configs.errors import UsageError
from pop_engine.configs.vision import VideoRecord
from pop_engine.runtime import Engine, SamplingParams
from pop_engine.runtime.cli import main
from pop_engine.runtime.images.loading import ImageSource
from pop_engine.runtime.images.positions import mrope_positions
from pop_engine.runtime.images.prompt import ImagePrompt
from pop_engine.runtime.images.video import Video
from pop_engine.runtime.prompt_rows import PromptRows
from vision_engine_kit import (
    MAX_SEQ_LEN,
    NUM_SLOTS,
    as_png,
    hf_video_text,
    image_at_the_end,
    prompt_tensors,
    save_frames,
    save_vision_checkpoint,
    shown,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUM_TOKENS = 8
OPTIONS: dict[str, Any] = {"tail_layers": 1, "max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS}
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
TOLERANCE = 1e-4
FIRST, SECOND = random_image(SIZES[0], 1), random_image(SIZES[2], 2)
NUM_FIRST, NUM_SECOND = (make_prompt([image]).token_ids.count(IMAGE) for image in (FIRST, SECOND))
Piece = int | Image.Image
PROMPTS: dict[str, list[Piece]] = {
    "no image": [9],
    "image at the start": [FIRST, 5],
    "image in the middle": [4, FIRST, 6],
    "image last before the question": [7, SECOND, 1],
    "two images": [3, FIRST, 2, SECOND, 4],
    "two images side by side": [FIRST, SECOND, 3],
    "one pixel": [2, random_image((1, 1)), 2],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_checkpoint(tmp_path_factory.mktemp("vision") / "qwen3-vl")


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    return load_hf_model(checkpoint)


@pytest.fixture
def engine(build_engine: EngineKit, checkpoint: Path) -> Engine:
    """One tail layer: pruned, and yet exact, because the last layer's K and V come from the exact input."""
    return build_engine(checkpoint, **OPTIONS)


def inputs_of(pieces: list[Piece]) -> tuple[list[int], list[bytes]]:
    """A prompt as the engine takes it: token ids, and image files."""
    return make_prompt(pieces).token_ids, [as_png(piece) for piece in pieces if isinstance(piece, Image.Image)]


def logits_of(engine: Engine, token_ids: Sequence[int], images: list[bytes], answer: list[int]) -> Any:
    """Logits after the prompt and after each token of an answer but its last."""
    with taken_slots(engine, 2) as (_, slot):
        rows = [engine.prefill(slot, engine.encode_images(token_ids, images))]
        return np.stack(rows + [engine.decode_step([slot], [token])[0] for token in answer[:-1]])


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_tokens_equal_transformers(engine: Engine, hf_model: Any, name: str) -> None:
    tokens, logits = hf_greedy(hf_model, make_prompt(PROMPTS[name]), NUM_TOKENS)
    token_ids, images = inputs_of(PROMPTS[name])
    assert list(engine.generate(token_ids, PARAMS, images=images).token_ids) == tokens
    assert relative_error(logits_of(engine, token_ids, images, tokens), logits) < TOLERANCE


def test_the_last_token_of_a_prompt_may_be_an_image(engine: Engine, hf_model: Any) -> None:
    """The boundary row is the last prompt token, whatever it is."""
    prompt, answer, logits = image_at_the_end(hf_model, FIRST)
    assert relative_error(logits_of(engine, prompt.token_ids, [as_png(FIRST)], answer), logits) < TOLERANCE


@pytest.mark.parametrize("max_prefill_len", [1, 5, 16])
def test_chunked_equals_whole(engine: Engine, max_prefill_len: int) -> None:
    token_ids, images = inputs_of(PROMPTS["two images"])
    answer = list(engine.generate(token_ids, PARAMS, images=images).token_ids)
    whole = logits_of(engine, token_ids, images, answer)
    with chunks_of(engine, max_prefill_len):
        assert relative_error(logits_of(engine, token_ids, images, answer), whole) < TOLERANCE


@pytest.mark.nightly
def test_the_two_step_boundary_with_images(build_engine: EngineKit, checkpoint: Path, hf_model: Any) -> None:
    """The paper's form: the boundary token, text or image, is the first decode step."""
    engine = build_engine(checkpoint, **OPTIONS, boundary="two-step")
    for pieces in PROMPTS.values():
        tokens, logits = hf_greedy(hf_model, make_prompt(pieces), NUM_TOKENS)
        for max_prefill_len in (6, MAX_SEQ_LEN):
            with chunks_of(engine, max_prefill_len):
                assert relative_error(logits_of(engine, *inputs_of(pieces), tokens), logits) < TOLERANCE
    prompt, answer, logits = image_at_the_end(hf_model, FIRST)
    assert relative_error(logits_of(engine, prompt.token_ids, [as_png(FIRST)], answer), logits) < TOLERANCE


@pytest.mark.parametrize("max_prefill_len", [40, 64])
def test_images_whose_tokens_see_each_other_stay_whole(
    engine: Engine, max_prefill_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cuts of a bidirectional model, on this causal one, which must not mind where they are."""
    vision = engine._vision
    assert vision is not None
    token_ids, images = inputs_of([3, FIRST, 2, SECOND, 30])
    answer = list(engine.generate(token_ids, PARAMS, images=images).token_ids)
    whole = logits_of(engine, token_ids, images, answer)
    monkeypatch.setattr(vision, "_record", dataclasses.replace(vision._record, image_attention="bidirectional"))
    prompt = engine.encode_images(token_ids, images)
    assert isinstance(prompt, ImagePrompt)
    chunks = PromptRows(prompt, vision, 0).chunks(0, len(prompt), max_prefill_len)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(len(prompt)))
    assert max(chunk.stop - chunk.start for chunk in chunks) <= max_prefill_len
    cuts = {chunk.stop for chunk in chunks}
    assert not any(placed.start < cut < placed.stop for placed in prompt.images for cut in cuts)
    with chunks_of(engine, max_prefill_len):
        assert relative_error(logits_of(engine, token_ids, images, answer), whole) < TOLERANCE
    with chunks_of(engine, NUM_FIRST - 1), pytest.raises(UsageError, match="must go in one chunk, of at most"):
        engine.generate(token_ids, PARAMS, images=images)
    assert engine.num_free_slots == NUM_SLOTS


def test_a_batch_of_texts_and_images(engine: Engine, hf_model: Any) -> None:
    """More prompts than slots, so that sequences at different distances between length and position decode together."""
    given = [inputs_of(pieces) for pieces in PROMPTS.values()]
    prompts = [engine.encode_images(token_ids, images) for token_ids, images in given]
    results = {e.index: e.result for e in engine.run_batch(prompts, [PARAMS] * len(prompts)) if e.result is not None}
    for index, pieces in enumerate(PROMPTS.values()):
        tokens, _ = hf_greedy(hf_model, make_prompt(pieces), NUM_TOKENS)
        result = results[index]
        assert result is not None
        assert list(result.token_ids) == tokens


def test_a_conversation_goes_on_with_another_image(engine: Engine, hf_model: Any) -> None:
    first, more = make_prompt([4, FIRST, 3]), make_prompt([2, SECOND, 5], seed=1)
    answer, _ = hf_greedy(hf_model, first, 3)
    whole = torch.cat([first.input_ids, torch.tensor([answer]), more.input_ids], dim=1)
    assert first.pixel_values is not None
    assert more.pixel_values is not None
    assert first.image_grid_thw is not None
    assert more.image_grid_thw is not None
    pixels, grids = (
        torch.cat([first.pixel_values, more.pixel_values]),
        torch.cat([first.image_grid_thw, more.image_grid_thw]),
    )
    tokens, logits = hf_greedy(hf_model, type(first)(whole, pixels, grids), 3)
    with taken_slots(engine, 1) as (slot,):
        engine.prefill(slot, engine.encode_images(first.token_ids, [as_png(FIRST)]))
        for token in answer:
            engine.decode_step([slot], [token])
        rows = [engine.prefill(slot, engine.encode_images(more.token_ids, [as_png(SECOND)]))]
        rows += [engine.decode_step([slot], [token])[0] for token in tokens[:-1]]
    assert relative_error(np.stack(rows), logits) < TOLERANCE


def test_a_freed_slot_forgets_its_positions(engine: Engine) -> None:
    token_ids = make_prompt([9]).token_ids
    expected = logits_of(engine, token_ids, [], [1, 2, 3])
    logits_of(engine, *inputs_of(PROMPTS["two images"]), [1, 2])
    assert (logits_of(engine, token_ids, [], [1, 2, 3]) == expected).all()


def test_shifted_positions_would_be_seen(engine: Engine, hf_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions off by one behind an image, and decode without the distance, both fail the parity above."""
    tokens, logits = hf_greedy(hf_model, make_prompt(PROMPTS["image in the middle"]), NUM_TOKENS)
    given = inputs_of(PROMPTS["image in the middle"])

    def shifted(num_tokens: int, images: Any, first: int) -> Any:
        positions, after = mrope_positions(num_tokens, images, first)
        positions[:, images[0].stop :] += 1
        return positions, after + 1

    with monkeypatch.context() as patch:
        patch.setattr("pop_engine.runtime.prompt_rows.mrope_positions", shifted)
        assert relative_error(logits_of(engine, *given, tokens), logits) > 10 * TOLERANCE
    with taken_slots(engine, 1) as (slot,):
        engine.prefill(slot, engine.encode_images(*given))
        engine._slots.rope_deltas[slot] = 0
        assert relative_error(engine.decode_step([slot], tokens[:1])[0], logits[1]) > 10 * TOLERANCE


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(as_png(FIRST))
    return path


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def test_messages_show_their_images(engine: Engine, tokenizer: Tokenizer, picture: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    images: list[Any] = [
        {"type": "image", "image": str(picture)},
        {"type": "image", "image": picture},
        {"type": "image", "image": picture.read_bytes()},
        {"type": "image", "image": url},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    text = f"<|im_start|>user\nsee {shown(NUM_FIRST)} here<|im_end|>\n<|im_start|>assistant"
    for image in images:
        content = [{"type": "text", "text": "see "}, image, {"type": "text", "text": " here"}]
        found = engine.encode_chat([{"role": "user", "content": content}])
        assert list(found) == tokenizer.encode(text).ids


def test_images_given_apart_come_first_in_the_last_message(engine: Engine, tokenizer: Tokenizer, picture: Path) -> None:
    messages: list[Any] = [{"role": "system", "content": "short"}, {"role": "user", "content": "describe"}]
    text = (
        f"<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\n{shown(NUM_FIRST)}{shown(NUM_SECOND)}"
        "describe<|im_end|>\n<|im_start|>assistant"
    )
    images: list[ImageSource] = [picture, as_png(SECOND)]
    assert list(engine.encode_chat(messages, images)) == tokenizer.encode(text).ids
    expected = engine.generate(
        text.replace("<|image_pad|>" * NUM_FIRST, "<|image_pad|>").replace(
            "<|image_pad|>" * NUM_SECOND, "<|image_pad|>"
        ),
        PARAMS,
        images=images,
    )
    found = engine.chat(messages, PARAMS, images=images)
    assert (found.text, found.metrics.num_prompt_tokens) == (expected.text, len(tokenizer.encode(text).ids))
    assert "".join(piece.text for piece in engine.stream_chat(messages, PARAMS, images=images)) == found.text


def test_a_text_shows_its_images(engine: Engine, tokenizer: Tokenizer, hf_model: Any, picture: Path) -> None:
    text = f"the cat {shown(1)} and the hat"
    found = engine.generate(text, PARAMS, images=[picture])
    token_ids = tokenizer.encode(f"the cat {shown(NUM_FIRST)} and the hat").ids
    prompt = make_prompt([FIRST])
    tokens, _ = hf_greedy(hf_model, Prompt(torch.tensor([token_ids]), *prompt_tensors(prompt)), NUM_TOKENS)
    assert list(found.token_ids) == tokens
    assert "".join(piece.text for piece in engine.stream(text, PARAMS, images=[picture])) == found.text


def test_a_video_is_shown_and_read_as_transformers_does(
    engine: Engine, tokenizer: Tokenizer, hf_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_frames(tmp_path / "clip", 5, (24, 16))
    vision = engine._vision
    assert vision is not None
    video = VideoRecord(fps=2, min_frames=4, max_frames=20, min_pixels=64, max_pixels=60_000)
    monkeypatch.setattr(vision, "_record", dataclasses.replace(vision._record, video=video))
    text = "<|vision_start|><|video_pad|><|vision_end|>what"
    prompt = engine.encode_images(text, videos=[Video(tmp_path / "clip", frame_rate=2)])
    shown_video = hf_video_text(VideoMetadata(total_num_frames=5, fps=2.0, frames_indices=list(range(5))), (3, 4, 6))
    token_ids = tokenizer.encode(text.replace("<|video_pad|>", shown_video)).ids
    assert list(prompt) == token_ids

    assert isinstance(prompt, ImagePrompt)
    pixels = [vision._processor.vision_inputs(placed.image)[io_contract.PIXEL_VALUES] for placed in prompt.images]
    ids = torch.tensor([token_ids])
    hf_model.model.rope_deltas = None
    expected = hf_model.generate(
        input_ids=ids,
        mm_token_type_ids=(ids == VIDEO).int() * 2,
        pixel_values_videos=torch.tensor(np.concatenate(pixels)),
        video_grid_thw=torch.tensor([[3, 4, 6]]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )[0, len(token_ids) :]
    assert list(engine.generate(prompt, PARAMS).token_ids) == expected.tolist()
    content: Any = [{"type": "video", "video": Video(tmp_path / "clip", 2)}, {"type": "text", "text": "what"}]
    assert set(engine.encode_chat([{"role": "user", "content": content}])) > {VIDEO, START, END}


# The command line.


def test_pop_run_with_images(
    build_engine: EngineKit, checkpoint: Path, engine: Engine, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = picture.with_name("question.txt")
    question.write_text("describe")
    directory = str(build_engine.directory(checkpoint, **OPTIONS))
    flags = ["--max-tokens", str(NUM_TOKENS), "--ignore-eos", "--threads", "1"]
    expected = engine.chat([{"role": "user", "content": "describe"}], PARAMS, images=[picture, picture]).text
    assert main([directory, str(question), "--image", str(picture), "--image", str(picture), *flags]) == 0
    assert capsys.readouterr().out == expected
    batch = picture.with_name("batch.jsonl")
    lines = [{"prompt": "describe", "images": [str(picture)] * 2}, {"prompt": "describe"}]
    batch.write_text("\n".join(map(json.dumps, lines)))
    assert main([directory, "--batch", str(batch), *flags]) == 0
    results = {line["index"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert results[0]["text"] == expected
    assert results[1]["text"] == engine.chat([{"role": "user", "content": "describe"}], PARAMS).text


def test_pop_run_with_an_image_that_is_cut_off(
    build_engine: EngineKit, checkpoint: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture.write_bytes(picture.read_bytes()[:-200])
    question = picture.with_name("question.txt")
    question.write_text("describe")
    directory = str(build_engine.directory(checkpoint, **OPTIONS))
    assert main([directory, str(question), "--image", str(picture)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"pop-run: error: image {str(picture)[:60]}")
    assert "the image is damaged or cut off" in captured.err
    assert captured.err.count("\n") == 1


def test_the_vision_graph_is_loaded_with_the_first_image(build_engine: EngineKit, checkpoint: Path) -> None:
    directory = build_engine.directory(checkpoint, **OPTIONS)
    with Engine.load(directory, threads=1) as own:
        vision = own._vision
        assert vision is not None
        own.generate([5, 6, 7], PARAMS)
        assert vision._session is None
        own.generate([START, IMAGE, END], SamplingParams(max_tokens=1), images=[as_png(FIRST)])
        assert vision._session is not None


# What is refused. Each is one line, and the engine goes on.

PAD = "<|image_pad|>"
REFUSED: dict[str, tuple[Any, str]] = {
    "more placeholders": (
        lambda e, path: e.generate(shown(1) * 2, images=[path]),
        f"{PAD} is there 2 times, but 1",
    ),
    "placeholder alone": (lambda e, path: e.generate(shown(1)), f"{PAD} is there 1 times, but 0"),
    "fewer placeholders": (
        lambda e, path: e.generate("a", images=[path]),
        f"1 images or videos are given for {PAD}",
    ),
    "typed into a message": (
        lambda e, path: e.chat([{"role": "user", "content": "<|image_pad|>"}], images=[path]),
        f"{PAD} is there 2 times, but 1",
    ),
    "too few tokens": (
        lambda e, path: e.generate([IMAGE] * 3, images=[path]),
        "it has 3 image tokens, but its 1 images",
    ),
    "too long": (
        lambda e, path: e.generate([IMAGE] * 9, images=[path] * 9),
        f"prompt of {9 * NUM_FIRST} tokens: the engine holds max_seq_len {MAX_SEQ_LEN}",
    ),
    "part without a type": (
        lambda e, path: e.chat([{"role": "user", "content": [{"text": "a"}]}]),
        "messages[0]: content[0]: type is None; expected text, image, image_url or video",
    ),
    "part without its image": (
        lambda e, path: e.chat([{"role": "user", "content": [{"type": "image"}]}]),
        "messages[0]: content[0]: 'image' is NoneType; expected a path, a data: URL or a file's bytes",
    ),
    "missing file": (lambda e, path: e.generate(shown(1), images=["no.png"]), "image no.png: cannot be read"),
    "web address": (
        lambda e, path: e.chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]
        ),
        "image https://x/y.png: the engine downloads nothing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(engine: Engine, picture: Path, name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        call(engine, picture)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert engine.num_free_slots == NUM_SLOTS
