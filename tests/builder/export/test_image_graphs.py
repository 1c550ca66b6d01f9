"""The graphs of a model with images, run by hand: against Hugging Face, and POP against the paper's method."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from engine_kit import BOUNDARIES, EngineKit, relative_error
from image_kit import (
    IMAGE,
    NUM_DEEPSTACK,
    NUM_LAYERS,
    NUM_VISION_LAYERS,
    SIZES,
    Graphs,
    Prompt,
    golden_images,
    hf_greedy,
    hf_logits,
    load_hf_model,
    make_prompt,
    random_image,
    save_tiny_qwen3_vl,
)
from pop_engine.builder import verify
from pop_engine.builder.checkpoint.layout import plan_weights
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.export.model import parameter_shapes
from pop_engine.builder.reference import image_features
from pop_engine.builder.verification_sample import image_sample
from pop_engine.builder.verify import verify_engine
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import MANIFEST_NAME, VerificationRecord
from pop_reference import decode, pop_prefill

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TAIL, NUM_TOKENS, MAX_SEQ_LEN = 2, 5, 128
# fp32 rounding, relative to the largest logit.
TOLERANCE = 1e-5
WRONG = 1e-2
Verify = Callable[[], VerificationRecord]
FIRST, SECOND = random_image(SIZES[0], 1), random_image(SIZES[2], 2)
PROMPTS: dict[str, tuple[list[int | Image.Image], int]] = {
    "no image": ([9], 0),
    "image at the start": ([FIRST, 5], 0),
    "image in the middle": ([4, FIRST, 6], 0),
    "the boundary token is an image's": ([7, SECOND], 1),
    "two images": ([3, FIRST, 2, SECOND, 4], 0),
}
prompts = pytest.mark.parametrize("name", PROMPTS)
boundaries = pytest.mark.parametrize("boundary", BOUNDARIES)


def prompt_of(name: str) -> Prompt:
    pieces, num_dropped = PROMPTS[name]
    return make_prompt(pieces, num_dropped=num_dropped)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3_vl(tmp_path_factory.mktemp("images") / "qwen3-vl")


@pytest.fixture(scope="module")
def hf_model(checkpoint: Path) -> Any:
    return load_hf_model(checkpoint)


@pytest.fixture(scope="module")
def graphs(build_engine: EngineKit, checkpoint: Path) -> dict[Boundary, Graphs]:
    return {
        boundary: Graphs(
            build_engine.directory(
                checkpoint, boundary=boundary, tail_layers=TAIL, max_seq_len=MAX_SEQ_LEN, max_batch_size=2
            )
        )
        for boundary in BOUNDARIES
    }


@pytest.fixture(scope="module")
def one_pass(graphs: dict[Boundary, Graphs]) -> Graphs:
    return graphs["one-pass"]


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (33, 57), (61, 22), (200, 12), (90, 110)])
def test_image_features_are_those_of_transformers(one_pass: Graphs, hf_model: Any, size: tuple[int, int]) -> None:
    prompt = make_prompt([random_image(size)])
    assert prompt.pixel_values is not None
    assert prompt.image_grid_thw is not None
    with torch.no_grad():
        expected = hf_model.model.get_image_features(prompt.pixel_values, prompt.image_grid_thw)
    features, deepstack = one_pass.encode(prompt.pixel_values, prompt.image_grid_thw[0])
    assert np.abs(features - expected.pooler_output[0].numpy()).max() < 1e-4
    assert deepstack.shape[0] == NUM_DEEPSTACK
    assert np.abs(deepstack - np.stack([own[0].numpy() for own in expected.deepstack_features])).max() < 1e-4


@prompts
def test_full_model_equals_transformers(one_pass: Graphs, hf_model: Any, name: str) -> None:
    prompt, answer = prompt_of(name), [5, 6, 7]
    rows, cache = one_pass.rows(prompt, hf_model), one_pass.empty_cache()
    logits = np.stack([one_pass.full(rows, cache), *one_pass.decode(rows, cache, answer)])
    assert relative_error(logits, hf_logits(hf_model, prompt, answer)) < TOLERANCE


# After an image's token `generate` counts on from its time, row and column, and not from the image's end as the
# model itself does and as training did.
@pytest.mark.parametrize("name", [name for name, (_, num_dropped) in PROMPTS.items() if not num_dropped])
def test_full_model_equals_generate(one_pass: Graphs, hf_model: Any, name: str) -> None:
    prompt = prompt_of(name)
    tokens, expected = hf_greedy(hf_model, prompt, NUM_TOKENS)
    rows, cache = one_pass.rows(prompt, hf_model), one_pass.empty_cache()
    logits = np.stack([one_pass.full(rows, cache), *one_pass.decode(rows, cache, tokens[:-1])])
    assert relative_error(logits, expected) < TOLERANCE
    assert list(logits.argmax(axis=1)) == tokens


@prompts
@boundaries
def test_pop_is_the_papers_with_images(
    graphs: dict[Boundary, Graphs], hf_model: Any, name: str, boundary: Boundary
) -> None:
    prompt, own = prompt_of(name), graphs[boundary]
    images = golden_images(prompt, hf_model)
    golden, golden_cache = pop_prefill(hf_model, prompt.token_ids, TAIL, images)
    answer = [5, 6, 7]
    rows, cache = own.rows(prompt, hf_model), own.empty_cache()
    position = int(rows.position_ids.max()) + 1
    steps = [decode(hf_model, golden_cache, [token], None, position + step)[-1] for step, token in enumerate(answer)]
    logits = np.stack([own.prefill(rows, cache), *own.decode(rows, cache, answer)])
    assert relative_error(logits, torch.stack([golden, *steps]).numpy()) < TOLERANCE
    # The pruned context is another one than the full model's, or this would prove nothing.
    full = np.stack([own.full(rows, own.empty_cache())])
    assert relative_error(logits[:1], full) > WRONG


def test_a_chunk_may_end_within_an_image(one_pass: Graphs, hf_model: Any) -> None:
    prompt = prompt_of("image in the middle")
    rows = one_pass.rows(prompt, hf_model)
    middle = prompt.token_ids.index(IMAGE) + 3
    whole, parts = one_pass.empty_cache(), one_pass.empty_cache()
    expected = one_pass.prefill(rows, whole)
    assert relative_error(one_pass.prefill(rows, parts, num_first=middle), expected) < TOLERANCE
    num_rows = rows.input_ids.shape[1]
    for name, values in whole.items():
        assert relative_error(parts[name][:, :, :num_rows], values[:, :, :num_rows]) < TOLERANCE


def test_without_deepstack_the_logits_are_wrong(one_pass: Graphs, hf_model: Any) -> None:
    prompt = prompt_of("image in the middle")
    rows = one_pass.rows(prompt, hf_model)
    _, expected = hf_greedy(hf_model, prompt, 1)
    assert relative_error(one_pass.full(rows, one_pass.empty_cache()), expected[0]) < TOLERANCE
    for layer_idx in range(NUM_DEEPSTACK):
        rows = one_pass.rows(prompt, hf_model)
        rows.deepstack_embeds[layer_idx] = 0
        assert relative_error(one_pass.full(rows, one_pass.empty_cache()), expected[0]) > WRONG


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_mrope_shifted_by_one_is_wrong(one_pass: Graphs, hf_model: Any, axis: int) -> None:
    prompt = prompt_of("image in the middle")
    rows = one_pass.rows(prompt, hf_model)
    _, expected = hf_greedy(hf_model, prompt, 1)
    rows.position_ids[axis, rows.image_ids > 0] += 1
    assert relative_error(one_pass.full(rows, one_pass.empty_cache()), expected[0]) > 1e2 * TOLERANCE


def test_operators_are_those_that_the_method_asks_for(graphs: dict[Boundary, Graphs]) -> None:
    one_pass, two_step = graphs["one-pass"].manifest, graphs["two-step"].manifest
    trunk, products = NUM_LAYERS - TAIL, ("FusedMatMul", "MatMul", "Gemm")

    def count(operators: dict[str, int], *names: str) -> int:
        return sum(operators.get(name, 0) for name in names)

    # The context rows' K of all tail layers are one product, and so are their V.
    assert count(one_pass.prefill.operators, *products) == trunk * 7 + 2 + TAIL * 7 + 1
    assert count(two_step.prefill.operators, *products) == trunk * 7 + 2
    for manifest in (one_pass, two_step):
        assert count(manifest.decode.operators, *products) == NUM_LAYERS * 7 + 1
        assert count(manifest.decode.operators, "GroupQueryAttention") == NUM_LAYERS
        assert count(manifest.decode.operators, "RotaryEmbedding") == NUM_LAYERS * 2
        assert count(manifest.decode.operators, "ScatterND", "ScatterElements", "NonZero") == 0
        vision = manifest.vision
        assert vision is not None
        # Patches; four in a layer; two in each merger.
        assert count(vision.graph.operators, *products) == 1 + NUM_VISION_LAYERS * 4 + (1 + NUM_DEEPSTACK) * 2
        assert count(vision.graph.operators, "MultiHeadAttention") == NUM_VISION_LAYERS
        assert count(vision.graph.operators, "SplitToSequence", "SequenceAt", "Conv") == 0
    assert count(two_step.prefill.operators, "GroupQueryAttention") == trunk


def test_every_graph_reads_the_checkpoints_own_file(one_pass: Graphs, checkpoint: Path) -> None:
    with safe_open(checkpoint / "model.safetensors", framework="np") as reader:
        stored = set(reader.keys())
    read = {file: external_weights(one_pass.directory / file) for file in ("decode.onnx", "vision.onnx")}
    # The decode graph reads the language model and the head, the vision graph the rest, and nothing is read twice.
    assert Counter([name for names in read.values() for name in names]) == Counter(stored)
    assert all(name.startswith("model.visual.") for name in read["vision.onnx"])
    linked = one_pass.directory / "weights" / "model.safetensors"
    assert linked.stat().st_ino == (checkpoint / "model.safetensors").stat().st_ino


def external_weights(path: Path) -> list[str]:
    graph = onnx.load(str(path), load_external_data=False).graph
    return [weight.name for weight in graph.initializer if weight.external_data]


@pytest.fixture(scope="module")
def verify_again(one_pass: Graphs, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Verify:
    """The build's own verification, on the engine that these tests have."""
    opened = open_checkpoint(BuildConfig(str(checkpoint), one_pass.directory))
    parameters = parameter_shapes(opened.hf_config)
    layout = plan_weights(parameters, opened, "fp32", None, tmp_path_factory.getbasetemp())
    return lambda: verify_engine(one_pass.directory, MANIFEST_NAME, one_pass.manifest, opened.hf_config, layout)


def test_verification_covers_an_image(verify_again: Verify) -> None:
    record = verify_again()
    assert record.status == "passed"
    assert record.num_image_tokens > 0
    assert 0 < record.features_max_error < 1e-4
    assert 0 < record.prefill_max_error < record.tolerance


def test_wrong_image_features_fail_the_build(verify_again: Verify, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: Any) -> torch.Tensor:
        features = image_features(*arguments)
        features[0, 0] += 0.5
        return features

    monkeypatch.setattr(verify, "image_features", shifted)
    with pytest.raises(EngineError, match="image features differ from the PyTorch reference by 0.5"):
        verify_again()


def test_an_engine_without_room_for_an_image_is_verified_without(one_pass: Graphs) -> None:
    manifest = one_pass.manifest
    assert manifest.vision is not None
    assert image_sample(manifest, manifest.vision) is not None
    short = replace(manifest, limits=replace(manifest.limits, max_seq_len=24))
    assert image_sample(short, manifest.vision) is None


@pytest.mark.nightly
def test_tied_embeddings_are_one_weight(build_engine: EngineKit, tmp_path: Path) -> None:
    folder = save_tiny_qwen3_vl(tmp_path / "tied", tie=True)
    model = load_hf_model(folder)
    own = Graphs(build_engine.directory(folder, tail_layers=0, max_seq_len=MAX_SEQ_LEN, max_batch_size=2))
    assert "lm_head.weight" not in external_weights(own.directory / "decode.onnx")
    prompt = prompt_of("two images")
    rows, cache = own.rows(prompt, model), own.empty_cache()
    tokens, expected = hf_greedy(model, prompt, NUM_TOKENS)
    logits = np.stack([own.prefill(rows, cache), *own.decode(rows, cache, tokens[:-1])])
    assert relative_error(logits, expected) < TOLERANCE
