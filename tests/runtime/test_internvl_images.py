"""InternVL with images, end to end: against Hugging Face, and POP against the paper's method."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine_kit import EngineKit, cached, chunks_of, relative_error, stacked, taken_slots
from image_answers import logits_of, unpruned
from image_kit import random_image
from internvl_kit import (
    TOKENS_PER_TILE,
    Piece,
    Prompt,
    golden_images,
    hf_features,
    hf_greedy,
    hf_image_text,
    hf_tiles,
    load_hf_model,
    make_prompt,
    save_tiny_internvl,
)
from pop_engine.builder.verification_sample import image_sample
from pop_engine.configs.errors import UsageError
from pop_engine.runtime import Engine, SamplingParams
from pop_engine.runtime.images.internvl import InternVLProcessor
from pop_engine.runtime.images.video import Video
from pop_reference import decode, pop_prefill
from vision_engine_kit import as_png

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TAIL, NUM_SLOTS, MAX_SEQ_LEN = 2, 3, 128
OPTIONS: dict[str, Any] = {"tail_layers": TAIL, "max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS}
NUM_ANSWER = 6
PARAMS = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True)
# fp32 rounding, relative to the largest logit, and what no rounding explains.
TOLERANCE, WRONG = 2e-5, 1e-2
# One tile; two beside each other and three below each other, with the whole image in small.
ONE, WIDE, HIGH = random_image((27, 31), 1), random_image((57, 29), 2), random_image((23, 66), 3)
PROMPTS: dict[str, tuple[list[Piece], int]] = {
    "no image": ([9], 0),
    "one tile at the start": ([ONE, 5], 0),
    "several tiles in the middle": ([4, WIDE, 6], 0),
    "image last before the question": ([7, HIGH, 1], 0),
    "the boundary token is an image's": ([7, HIGH], 1),
    "two images": ([3, HIGH, 2, WIDE, 4], 0),
    "one pixel": ([2, random_image((1, 1)), 2], 0),
}
prompts = pytest.mark.parametrize("name", PROMPTS)


def prompt_of(name: str) -> Prompt:
    pieces, num_dropped = PROMPTS[name]
    return make_prompt(pieces, num_dropped=num_dropped)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_internvl(tmp_path_factory.mktemp("internvl") / "internvl")


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    return load_hf_model(checkpoint)


@pytest.fixture
def engine(build_engine: EngineKit, checkpoint: Path) -> Engine:
    return build_engine(checkpoint, **OPTIONS)


def files_of(prompt: Prompt) -> list[bytes]:
    return list(map(as_png, prompt.images))


def test_the_images_have_the_tiles_that_are_meant() -> None:
    assert hf_tiles([ONE, WIDE, HIGH])[1] == [1, 2 + 1, 3 + 1]


@pytest.mark.parametrize("size", [(1, 1), (33, 57), (200, 12)])
def test_image_features_are_those_of_transformers(engine: Engine, hf_model: Any, size: tuple[int, int]) -> None:
    image = random_image(size)
    features = engine.image_features(as_png(image))
    expected = hf_features(hf_model, [image]).numpy()
    assert features.shape == expected.shape
    assert np.abs(features - expected).max() < 1e-4


@prompts
def test_full_model_equals_generate(engine: Engine, hf_model: Any, name: str) -> None:
    prompt = prompt_of(name)
    tokens, logits = hf_greedy(hf_model, prompt, NUM_ANSWER)
    with unpruned(engine):
        found = engine.generate(prompt.token_ids, PARAMS, images=files_of(prompt))
        assert list(found.token_ids) == tokens
        assert relative_error(logits_of(engine, prompt, tokens[:-1]), logits) < TOLERANCE


@prompts
def test_pop_is_the_papers_with_images(engine: Engine, hf_model: Any, name: str) -> None:
    prompt, answer = prompt_of(name), [5, 6, 7]
    expected, cache = pop_prefill(hf_model, prompt.token_ids, TAIL, golden_images(prompt, hf_model))
    with taken_slots(engine, 1) as (slot,):
        found = [engine.prefill(slot, engine.encode_images(prompt.token_ids, files_of(prompt)))]
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE
        found += [engine.decode_step([slot], [token])[0] for token in answer]
    steps = [decode(hf_model, cache, [token])[-1] for token in answer]
    logits = np.stack(found)
    assert relative_error(logits, torch.stack([expected, *steps]).numpy()) < TOLERANCE
    # The pruned context is another one than the full model's, or this would prove nothing.
    with unpruned(engine):
        assert relative_error(logits, logits_of(engine, prompt, answer)) > WRONG


@pytest.mark.parametrize("max_prefill_len", [1, TOKENS_PER_TILE + 1, 16])
def test_chunked_equals_whole(engine: Engine, max_prefill_len: int) -> None:
    """Wherever the chunks are cut: an image's tokens are causal."""
    prompt, answer = prompt_of("two images"), [5, 6]
    expected = logits_of(engine, prompt, answer)
    with chunks_of(engine, max_prefill_len):
        assert relative_error(logits_of(engine, prompt, answer), expected) < TOLERANCE


def test_a_batch_of_texts_and_images(engine: Engine, hf_model: Any) -> None:
    given = [prompt_of(name) for name in PROMPTS]
    encoded = [engine.encode_images(prompt.token_ids, files_of(prompt)) for prompt in given]
    with unpruned(engine):
        events = list(engine.run_batch(encoded, [PARAMS] * len(encoded)))
    results = {event.index: event.result for event in events if event.result is not None}
    for index, prompt in enumerate(given):
        assert list(results[index].token_ids) == hf_greedy(hf_model, prompt, NUM_ANSWER)[0]


def test_tiles_in_another_order_are_wrong(engine: Engine, hf_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parity above tells apart, and with it rows of tiles from columns."""
    prompt = prompt_of("two images")
    tokens, logits = hf_greedy(hf_model, prompt, NUM_ANSWER)
    made = InternVLProcessor.vision_inputs
    monkeypatch.setattr(
        InternVLProcessor,
        "vision_inputs",
        lambda self, image: {name: tiles[::-1] for name, tiles in made(self, image).items()},
    )
    with unpruned(engine):
        assert relative_error(logits_of(engine, prompt, tokens[:-1]), logits) > WRONG


def test_texts_and_messages_show_images_as_transformers_does(engine: Engine, checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    files: Any = [as_png(WIDE), as_png(ONE)]
    shown, more = hf_image_text(3), hf_image_text(1)
    found = engine.encode_images("the cat <IMG_CONTEXT>\nand <IMG_CONTEXT>the hat", files)
    assert list(found) == tokenizer.encode(f"the cat {shown}\nand {more}the hat").ids
    content: Any = [{"type": "image", "image": files[0]}, {"type": "text", "text": "what"}]
    expected = tokenizer.encode(f"<|im_start|>user\n{shown}\nwhat<|im_end|>\n<|im_start|>assistant").ids
    assert list(engine.encode_chat([{"role": "user", "content": content}])) == expected


def test_videos_are_refused(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this model takes images, but no videos; give frames as images"):
        engine.encode_images("<video>what", videos=[Video(tmp_path)])


def test_a_build_is_checked_with_several_tiles(engine: Engine) -> None:
    manifest = engine.manifest
    assert manifest.vision is not None
    sample = image_sample(manifest, manifest.vision)
    assert sample is not None
    assert sample.image is not None
    assert hf_tiles([sample.image])[1] == [2 + 1]
    limits = dataclasses.replace(manifest.limits, max_seq_len=3 * TOKENS_PER_TILE)
    assert image_sample(dataclasses.replace(manifest, limits=limits), manifest.vision) is None


@pytest.mark.nightly
def test_the_two_step_boundary_with_images(build_engine: EngineKit, checkpoint: Path, hf_model: Any) -> None:
    engine = build_engine(checkpoint, **OPTIONS | {"tail_layers": 1}, boundary="two-step")
    for name in PROMPTS:
        prompt = prompt_of(name)
        tokens, logits = hf_greedy(hf_model, prompt, NUM_ANSWER)
        for max_prefill_len in (6, MAX_SEQ_LEN):
            with chunks_of(engine, max_prefill_len):
                assert relative_error(logits_of(engine, prompt, tokens[:-1]), logits) < TOLERANCE


@pytest.mark.nightly
def test_a_tower_of_the_larger_checkpoints(
    build_engine: EngineKit, hf_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """InternViT-6B's form: RMS norms, queries and keys normed, no biases."""
    options = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}
    folder = save_tiny_internvl(tmp_path_factory.mktemp("internvl") / "rms", **options)
    engine = build_engine(folder, **OPTIONS)
    features, expected = engine.image_features(as_png(WIDE)), hf_features(load_hf_model(folder), [WIDE]).numpy()
    assert np.abs(features - expected).max() < 1e-4
    assert np.abs(features - hf_features(hf_model, [WIDE]).numpy()).max() > WRONG


@pytest.mark.nightly
def test_a_build_is_verified_with_an_image(build_engine: EngineKit, checkpoint: Path) -> None:
    directory = build_engine.directory(checkpoint, verify=True, **OPTIONS)
    with Engine.load(directory, threads=1) as engine:
        verification = engine.manifest.verification
        assert verification is not None
        assert (verification.status, verification.num_image_tokens) == ("passed", 3 * TOKENS_PER_TILE)
        assert verification.features_max_error < 1e-4
