"""Gemma 3 through the runtime: square images, whose tokens see each other, across windows shorter than an image."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from engine_kit import EngineKit, chunks_of, random_tokens, relative_error, taken_slots
from image_kit import generate_greedily, random_image
from vision_engine_kit import as_png

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("one_torch_thread")]

IMAGE, START, END = 300, 301, 302
IMAGE_SIZE, TOKENS_PER_IMAGE = 32, 16
NUM_TOKENS, TOLERANCE = 8, 1e-5
FIRST, SECOND = random_image((50, 37), 1), random_image((20, 64), 2)
PROMPTS: dict[str, list[int | Image.Image]] = {
    "no image": [9],
    "image at the start": [FIRST, 5],
    "image in the middle": [4, FIRST, 20],
    "two images": [3, FIRST, 2, SECOND, 4],
    "image at the end": [4, SECOND],
}


def tiny_gemma3() -> Any:
    """Windows of 12 tokens in every other layer; every token of an image of 16 sees the others all the same."""
    text = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "max_position_embeddings": 256,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": IMAGE_SIZE, "patch_size": 4}  # fmt: skip
    tokens: dict[str, Any] = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END, "eos_token_id": None}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=TOKENS_PER_IMAGE, **tokens)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name and weight.dim() == 1
            weight.copy_(torch.rand_like(weight) - 0.5 if is_norm else torch.randn_like(weight) * 0.2)
    return model.eval()


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return tiny_gemma3()


@pytest.fixture(scope="module")
def engine(build_engine: EngineKit, hf_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gemma3")
    weights = {name: tensor.contiguous() for name, tensor in hf_model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf_model.config.save_pretrained(folder)
    processor().save_pretrained(folder)
    return build_engine(folder, tail_layers=1, max_seq_len=128, max_batch_size=2)


def processor() -> Any:
    return Gemma3ImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})


def hf_greedy(hf_model: Any, token_ids: list[int], images: list[Image.Image]) -> tuple[list[int], Any]:
    ids = torch.tensor([token_ids])
    pixels = {"pixel_values": processor()(images, return_tensors="pt")["pixel_values"]} if images else {}
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == IMAGE).int()}
    return generate_greedily(hf_model, arguments | pixels, NUM_TOKENS)


@pytest.mark.parametrize("max_prefill_len", [128, TOKENS_PER_IMAGE])
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_tokens_equal_transformers(engine: Any, hf_model: Any, name: str, max_prefill_len: int) -> None:
    """In one call, and in chunks that are cut before an image where they would part it."""
    token_ids: list[int] = []
    for piece in PROMPTS[name]:
        if isinstance(piece, int):
            token_ids += random_tokens(piece, vocab_size=IMAGE)
        else:
            token_ids += [START, *[IMAGE] * TOKENS_PER_IMAGE, END]
    images = [piece for piece in PROMPTS[name] if isinstance(piece, Image.Image)]
    tokens, logits = hf_greedy(hf_model, token_ids, images)
    with chunks_of(engine, max_prefill_len), taken_slots(engine, 1) as (slot,):
        rows = [engine.prefill(slot, engine.encode_images(token_ids, [as_png(image) for image in images]))]
        rows += [engine.decode_step([slot], [token])[0] for token in tokens[:-1]]
    assert relative_error(np.stack(rows), logits) < TOLERANCE
    assert [int(row.argmax()) for row in rows] == tokens
