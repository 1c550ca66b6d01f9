"""The graphs that TensorRT gets, run in ONNX Runtime: fp32, weights as inputs, against PyTorch."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from engine_kit import random_tokens, relative_error
from pop_engine.configs import io_contract as io
from pop_reference import decode as reference_decode
from pop_reference import pop_prefill
from tensorrt_kit import (
    HEAD_DIM,
    MAX_SEQ_LEN,
    NUM_KEY_VALUE_HEADS,
    NUM_LAYERS,
    VOCAB_SIZE,
    WINDOW,
    Case,
    Family,
    LoweredGraph,
    LoweredGraphs,
    tiny_config,
)

TOLERANCE = 1e-4
Caches = dict[str, NDArray[np.float32]]


class Runner:
    """One lowered graph with its weights; the caches go in and come out."""

    def __init__(self, graph: LoweredGraph, weights: Caches) -> None:
        self._session = ort.InferenceSession(graph.path, providers=["CPUExecutionProvider"])
        self._contract = graph.contract
        self._weights = {binding.name: weights[binding.name] for binding in graph.contract.weights}

    def __call__(self, caches: Caches, tokens: NDArray[np.int64], cache_len: int, **rows: Any) -> NDArray[np.float32]:
        positions = cache_len + np.arange(tokens.shape[1])
        inputs = {
            io.INPUT_IDS: tokens,
            io.POSITION_IDS: np.broadcast_to(positions, tokens.shape),
            io.CACHE_LEN: np.full(len(tokens), cache_len),
            **{name: np.array(value, np.int64) for name, value in rows.items()},
        }
        names = [binding.name for binding in self._contract.outputs]
        found = dict(zip(names, self._session.run(names, {**inputs, **caches, **self._weights}), strict=True))
        for binding in self._contract.outputs:
            if binding.alias is not None:
                caches[binding.alias] = found[binding.name]
        logits: NDArray[np.float32] = found[io.LOGITS]
        return logits


def empty_caches(batch: int = 1) -> Caches:
    """Filled with a number that would show, if anything read behind the valid length."""
    names = [name(layer_idx) for layer_idx in range(NUM_LAYERS) for name in (io.past_key, io.past_value)]
    return {name: np.full((batch, NUM_KEY_VALUE_HEADS, MAX_SEQ_LEN, HEAD_DIM), 50.0, np.float32) for name in names}


def random_model(family: Family) -> tuple[Any, Caches]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) * 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.15)
    return model.eval(), {name: weight.detach().numpy() for name, weight in model.named_parameters()}


@pytest.mark.usefixtures("one_torch_thread")
def test_one_pass_prefill_in_chunks_then_decode(lowered: LoweredGraphs) -> None:
    """A chunk before the last gives all rows as context and its last once more: what lands behind is overwritten."""
    model, weights = random_model("llama")
    tokens = random_tokens(18, vocab_size=VOCAB_SIZE)
    prompt, following = tokens[:-1], tokens[-1:]
    expected, cache = pop_prefill(model, prompt, 1)

    prefill = Runner(lowered(Case("llama", "prefill", dtype="fp32")), weights)
    caches, given = empty_caches(), np.array([prompt])
    prefill(caches, given[:, :10], 0, context_rows=range(10), boundary_rows=[9])
    logits = prefill(caches, given[:, 10:], 10, context_rows=range(6), boundary_rows=[6])
    assert relative_error(logits[0, -1], expected.numpy()) < TOLERANCE
    assert relative_error(caches[io.past_key(2)][0, :, :17], cache.keys[2][0].numpy()) < TOLERANCE

    decode = Runner(lowered(Case("llama", "decode", dtype="fp32")), weights)
    logits = decode(caches, np.array([following]), 17)
    assert relative_error(logits[0], reference_decode(model, cache, following).numpy()) < TOLERANCE


@pytest.mark.usefixtures("one_torch_thread")
def test_a_prompt_of_one_token_has_no_context_rows(lowered: LoweredGraphs) -> None:
    model, weights = random_model("llama")
    prompt = random_tokens(1, vocab_size=VOCAB_SIZE)
    prefill = Runner(lowered(Case("llama", "prefill", dtype="fp32")), weights)
    logits = prefill(empty_caches(), np.array([prompt]), 0, context_rows=[], boundary_rows=[0])
    assert relative_error(logits[0, -1], pop_prefill(model, prompt, 1)[0].numpy()) < TOLERANCE


@pytest.mark.usefixtures("one_torch_thread")
def test_masks_of_windows_against_hugging_face(lowered: LoweredGraphs) -> None:
    """Several tokens across the window's edge, then one, for two sequences."""
    model, weights = random_model("gemma3")
    tokens = np.array([random_tokens(2 * WINDOW + 9, seed, VOCAB_SIZE) for seed in (1, 2)])
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()

    decode = Runner(lowered(Case("gemma3", "decode", dtype="fp32")), weights)
    caches = empty_caches(batch=2)
    pieces = [(0, WINDOW - 3), (WINDOW - 3, 2 * WINDOW + 8), (2 * WINDOW + 8, 2 * WINDOW + 9)]
    found = [decode(caches, tokens[:, start:end], start) for start, end in pieces]
    assert relative_error(np.concatenate(found, axis=1), expected) < TOLERANCE
