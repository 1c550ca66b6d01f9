"""Real weights: Hugging Face's class on an engine's own weight file, and greedy decoding by either of them."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from engine_kit import taken_slots
from pop_engine.runtime import Engine

NUM_NEW_TOKENS = 64
MAX_LOGIT_ERROR = 1e-3


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logits [len(token_ids), vocab_size] that chose them."""

    token_ids: list[int]
    logits: NDArray[np.float32]


def load_on_engine_weights(config: PreTrainedConfig, directory: Path) -> Any:
    """A model with tied embeddings in Hugging Face's own class, fp32 (loading a GGUF file takes much longer)."""
    # Buffers are in no checkpoint: the class computes them, but not on the meta device.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    left = model.load_state_dict(load_file(directory / "weights" / "model.safetensors"), strict=False, assign=True)
    assert left.unexpected_keys == []
    assert left.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model.eval()


def engine_greedy(engine: Engine, prompt: list[int], num_tokens: int = NUM_NEW_TOKENS) -> Answer:
    """Through prefill and decode_step, to see the logits."""
    with taken_slots(engine, 1) as (slot,):
        rows = [engine.prefill(slot, prompt)]
        while len(rows) < num_tokens:
            rows.append(engine.decode_step([slot], [int(rows[-1].argmax())])[0])
    return Answer([int(row.argmax()) for row in rows], np.stack(rows))


def hf_greedy(model: Any, prompt: list[int]) -> Answer:
    """Hugging Face's generate. No end token stops it, as the engine ignores them too."""
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=NUM_NEW_TOKENS, pad_token_id=0, eos_token_id=None, bos_token_id=None
    )
    given = torch.tensor([prompt])
    with torch.no_grad():
        result = model.generate(
            given, attention_mask=torch.ones_like(given), output_logits=True, return_dict_in_generate=True
        )
    return Answer(result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits).numpy())


@torch.no_grad()
def hf_logits(model: Any, prompt: list[int], continuation: list[int]) -> NDArray[np.float32]:
    """Logits that follow the prompt and every token of a continuation but its last."""
    logits = model(torch.tensor([prompt + continuation[:-1]]), logits_to_keep=len(continuation)).logits[0]
    return np.asarray(logits.numpy())


def check_full_engine(engine: Engine, model: Any, prompt: list[int]) -> None:
    """A full engine's greedy tokens and logits are Hugging Face's, near-ties aside."""
    found, expected = engine_greedy(engine, prompt), hf_greedy(model, prompt)
    assert len(found.token_ids) == len(expected.token_ids) == NUM_NEW_TOKENS
    differs = [i for i, pair in enumerate(zip(found.token_ids, expected.token_ids, strict=True)) if pair[0] != pair[1]]
    # Up to the first difference both saw the same tokens.
    num_shared = differs[0] + 1 if differs else NUM_NEW_TOKENS
    errors = np.abs(found.logits[:num_shared] - expected.logits[:num_shared]).max(axis=1)
    print(f"{len(prompt)} tokens: logit error {errors[0]:.2g} at prefill, {errors[1:].max(initial=0):.2g} at decode")
    assert errors.max() < MAX_LOGIT_ERROR
    if differs:
        own = hf_logits(model, prompt, found.token_ids)
        assert np.abs(found.logits - own).max() < MAX_LOGIT_ERROR
        _check_near_ties(found, own, f"prompt of {len(prompt)} tokens")


def _check_near_ties(found: Answer, expected: NDArray[np.float32], where: str) -> None:
    """Every token is the reference's own best, or the two that compete are closer than rounding and that is said."""
    for step, token_id in enumerate(found.token_ids):
        best = int(expected[step].argmax())
        if token_id != best:
            margin = float(expected[step, best] - expected[step, token_id])
            assert margin < 2 * MAX_LOGIT_ERROR, f"{where}, step {step}: {token_id} instead of {best} by {margin:.3g}"
            warnings.warn(f"{where}, step {step}: tokens {best} and {token_id} are {margin:.2g} apart", stacklevel=2)
