"""Gemma 3 with images, end to end: against Hugging Face, and POP against the paper's method."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_kit import EngineKit, cached, chunks_of, relative_error, stacked, taken_slots
from gemma3_kit import (
    NUM_LAYERS,
    NUM_TOKENS,
    OTHER_LAYER_TYPES,
    WINDOW,
    Piece,
    Prompt,
    golden_images,
    hf_features,
    hf_greedy,
    hf_logits,
    load_hf_model,
    make_prompt,
    save_tiny_gemma3,
)
from image_answers import logits_of, unpruned
from image_kit import IMAGE, random_image
from pop_engine.builder.export.families.gemma3 import Gemma3
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime import Engine, SamplingParams
from pop_reference import decode, one_pass_prefill, pop_prefill
from vision_engine_kit import as_png

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TAIL, NUM_SLOTS, MAX_SEQ_LEN = 2, 3, 96
OPTIONS: dict[str, Any] = {"tail_layers": TAIL, "max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS}
NUM_ANSWER = 6
PARAMS = SamplingParams(max_tokens=NUM_ANSWER, ignore_eos=True)
# fp32 rounding, relative to the largest logit, and what no rounding explains.
TOLERANCE, WRONG = 2e-5, 1e-2
FIRST, SECOND = random_image((33, 57), 1), random_image((61, 22), 2)
PROMPTS: dict[str, tuple[list[Piece], int]] = {
    "no image": ([9], 0),
    "no image, longer than two windows": ([2 * WINDOW + 5], 0),
    "image at the start": ([FIRST, 5], 0),
    "image in the middle": ([WINDOW + 3, FIRST, 6], 0),
    "image last before the question": ([7, SECOND, 1], 0),
    "image last": ([7, SECOND], 0),
    "the boundary token is an image's": ([7, SECOND], 1),
    "two images": ([3, FIRST, 2, SECOND, 4], 0),
}
prompts = pytest.mark.parametrize("name", PROMPTS)


def prompt_of(name: str) -> Prompt:
    pieces, num_dropped = PROMPTS[name]
    return make_prompt(pieces, num_dropped=num_dropped)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gemma3(tmp_path_factory.mktemp("gemma3") / "gemma3")


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    return load_hf_model(checkpoint)


@pytest.fixture
def engine(build_engine: EngineKit, checkpoint: Path) -> Engine:
    return build_engine(checkpoint, **OPTIONS)


@pytest.mark.parametrize("size", [(1, 1), (33, 57), (200, 12)])
def test_image_features_are_those_of_transformers(engine: Engine, hf_model: Any, size: tuple[int, int]) -> None:
    prompt = make_prompt([random_image(size)])
    features = engine.image_features(as_png(prompt.images[0]))
    assert features.shape[0] == NUM_TOKENS
    assert np.abs(features - hf_features(hf_model, prompt).numpy()).max() < 1e-4


@prompts
def test_full_model_equals_generate(engine: Engine, hf_model: Any, name: str) -> None:
    prompt = prompt_of(name)
    tokens, logits = hf_greedy(hf_model, prompt, NUM_ANSWER)
    with unpruned(engine):
        found = engine.generate(prompt.token_ids, PARAMS, images=list(map(as_png, prompt.images)))
        assert list(found.token_ids) == tokens
        assert relative_error(logits_of(engine, prompt, tokens[:-1]), logits) < TOLERANCE


@prompts
def test_pop_is_the_papers_with_images(engine: Engine, hf_model: Any, name: str) -> None:
    prompt, answer = prompt_of(name), [5, 6, 7]
    images = golden_images(prompt, hf_model)
    # A last image row is seen by the others in the trunk: the two steps of the paper would part them.
    golden = one_pass_prefill if prompt.token_ids[-1] == IMAGE else pop_prefill
    expected, cache = golden(hf_model, prompt.token_ids, TAIL, images)
    with taken_slots(engine, 1) as (slot,):
        found = [engine.prefill(slot, engine.encode_images(prompt.token_ids, list(map(as_png, prompt.images))))]
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE
        found += [engine.decode_step([slot], [token])[0] for token in answer]
    steps = [decode(hf_model, cache, [token])[-1] for token in answer]
    logits = np.stack(found)
    assert relative_error(logits, torch.stack([expected, *steps]).numpy()) < TOLERANCE
    # The pruned context is another one than the full model's, or this would prove nothing.
    assert relative_error(logits, hf_logits(hf_model, prompt, answer)) > WRONG


@pytest.mark.parametrize("max_prefill_len", [NUM_TOKENS, NUM_TOKENS + 3, 30])
def test_chunked_equals_whole(engine: Engine, max_prefill_len: int) -> None:
    prompt, answer = prompt_of("two images"), [5, 6]
    expected = logits_of(engine, prompt, answer)
    with chunks_of(engine, max_prefill_len):
        assert relative_error(logits_of(engine, prompt, answer), expected) < TOLERANCE


def test_an_image_that_no_chunk_holds_is_refused(engine: Engine) -> None:
    prompt = prompt_of("image at the start")
    with chunks_of(engine, NUM_TOKENS - 1), pytest.raises(UsageError, match="must go in one chunk, of at most 15"):
        engine.generate(prompt.token_ids, PARAMS, images=[as_png(FIRST)])


def test_a_batch_of_texts_and_images(engine: Engine, hf_model: Any) -> None:
    given = [prompt_of(name) for name in PROMPTS]
    prompts = [engine.encode_images(prompt.token_ids, list(map(as_png, prompt.images))) for prompt in given]
    with unpruned(engine):
        events = list(engine.run_batch(prompts, [PARAMS] * len(prompts)))
    results = {event.index: event.result for event in events if event.result is not None}
    for index, prompt in enumerate(given):
        assert list(results[index].token_ids) == hf_greedy(hf_model, prompt, NUM_ANSWER)[0]


def test_swapped_layer_types_and_a_causal_mask_are_wrong(engine: Engine, hf_model: Any, checkpoint: Path) -> None:
    """What the parity above tells apart: local and global layers, and attention among an image's tokens."""
    prompt, answer = prompt_of("image in the middle"), [5, 6]
    with unpruned(engine):
        found = logits_of(engine, prompt, answer)
    assert relative_error(found, hf_logits(hf_model, prompt, answer)) < TOLERANCE
    assert relative_error(found, hf_logits(hf_model, prompt, answer, images_whole=False)) > WRONG
    swapped = load_hf_model(checkpoint, layer_types=OTHER_LAYER_TYPES)
    assert relative_error(found, hf_logits(swapped, prompt, answer)) > WRONG


@pytest.mark.nightly
@pytest.mark.parametrize("boundary", ["one-pass", "two-step"])
def test_full_engine_equals_generate(build_engine: EngineKit, checkpoint: Path, hf_model: Any, boundary: str) -> None:
    engine = build_engine(checkpoint, **OPTIONS | {"tail_layers": 0}, boundary=boundary)
    for name in PROMPTS:
        prompt = prompt_of(name)
        tokens, logits = hf_greedy(hf_model, prompt, NUM_ANSWER)
        for max_prefill_len in (NUM_TOKENS, MAX_SEQ_LEN):
            with chunks_of(engine, max_prefill_len):
                assert relative_error(logits_of(engine, prompt, tokens[:-1]), logits) < TOLERANCE


@pytest.mark.nightly
def test_a_graph_without_the_mask_is_wrong(
    build_engine: EngineKit, checkpoint: Path, hf_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gemma3, "image_attention", "causal")
    # Another limit is another trace.
    engine = build_engine(checkpoint, **OPTIONS | {"max_seq_len": MAX_SEQ_LEN + 1})
    prompt, answer = prompt_of("image in the middle"), [5, 6]
    with unpruned(engine):
        found = logits_of(engine, prompt, answer)
    assert relative_error(found, hf_logits(hf_model, prompt, answer, images_whole=False)) < TOLERANCE
    assert relative_error(found, hf_logits(hf_model, prompt, answer)) > WRONG


@pytest.mark.nightly
def test_a_build_is_verified_with_an_image(build_engine: EngineKit, checkpoint: Path) -> None:
    directory = build_engine.directory(checkpoint, verify=True, **OPTIONS)
    with Engine.load(directory, threads=1) as engine:
        verification = engine.manifest.verification
        assert verification is not None
        assert (verification.status, verification.num_image_tokens) == ("passed", NUM_TOKENS)
        assert verification.features_max_error < 1e-4


@pytest.mark.nightly
def test_tensorrt_plans_keep_every_mask(build_engine: EngineKit, checkpoint: Path) -> None:
    """A layer without a window has one too: the build compares each with its graph's, and fails where it is lost."""
    pytest.importorskip("tensorrt_rtx")
    options = OPTIONS | {"target": "tensorrt-rtx", "gpu": "sm89", "dtype": "bf16"}
    manifest = Manifest.load(build_engine.directory(checkpoint, **options))
    for graph in (manifest.prefill, manifest.decode):
        assert graph.plan is not None
        assert len(graph.plan.attentions) == NUM_LAYERS
        assert all(found.mask and found.causal == "none" for found in graph.plan.attentions)
