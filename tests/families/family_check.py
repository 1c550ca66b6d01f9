"""Build a tiny model of a family, run it, and compare it with Hugging Face in fp32."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine_kit import EngineKit, chunks_of, random_tokens, taken_slots
from families.family_table import FAMILIES, Family
from pop_engine.builder.reference import Reference, reference_logits
from pop_engine.configs.errors import PopError
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.runtime import Engine
from pop_engine.runtime.kv_cache import SlotRange

Logits = NDArray[np.float32]

# More than twice the windows of the table, and no multiple of the chunks.
PROMPT_LEN, NUM_STEPS, CHUNK_LEN = 21, 5, 6
MAX_SEQ_LEN = 48
_LIMITS: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": 2}


@dataclass
class FamilyResult:
    """What a build of a family came to: an error per check, relative to the largest logit, or a refusal."""

    errors: dict[str, float] = field(default_factory=dict)
    operators: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    refusal: str = ""


def check_family(name: str, folder: Path) -> FamilyResult:
    """Build and compare; a refusal is a result, any other exception is not caught."""
    family, result = FAMILIES[name], FamilyResult()
    config = family.config()
    kit = EngineKit(folder)
    try:
        if family.refused:
            save_checkpoint(config, None, folder / "checkpoint")
            kit.directory(folder / "checkpoint", with_weights=False, **_LIMITS)
        else:
            _compare(family, config, kit, result)
    except PopError as error:
        result.refusal = str(error).replace(f"{folder}/checkpoint/", "")
    finally:
        kit.close()
    return result


def _compare(family: Family, config: PretrainedConfig, kit: EngineKit, result: FamilyResult) -> None:
    checkpoint = kit_folder(kit) / "checkpoint"
    model = random_model(config)
    save_checkpoint(config, model, checkpoint)
    num_layers = config.get_text_config(decoder=True).num_hidden_layers

    def engine(num_tail_layers: int, boundary: Boundary) -> Engine:
        built = kit(checkpoint, tail_layers=num_tail_layers, boundary=boundary, **_LIMITS)
        kind = boundary if num_tail_layers else "full"
        result.operators[kind] = built.manifest.prefill.operators
        result.operators["decode"] = built.manifest.decode.operators
        return built

    plan = PrunePlan(num_layers, num_layers // 2)
    two_step = engine(plan.num_tail_layers, "two-step")
    _compare_decode(two_step, model, result)
    expected = _references(model, plan)
    _compare_prefill(two_step, expected, "two-step", result)
    _compare_prefill(engine(plan.num_tail_layers, "one-pass"), expected, "one-pass", result)
    if family.full_prefill:
        _compare_prefill(engine(0, "one-pass"), _references(model, PrunePlan(num_layers, 0)), "full", result)


def kit_folder(kit: EngineKit) -> Path:
    """Where a kit builds."""
    return kit._root


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """A model with weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = weight.dim() == 1 and not name.endswith("bias")
            weight.copy_(torch.rand_like(weight) * 0.5 + 0.5 if is_norm else torch.randn_like(weight) * 0.2)
    return model


def save_checkpoint(config: PretrainedConfig, model: PreTrainedModel | None, folder: Path) -> None:
    """A checkpoint as the hub has them: transformers stores experts one by one."""
    if model is None:
        config.save_pretrained(folder)
    else:
        model.save_pretrained(folder)


def _prompts() -> tuple[list[int], list[int], list[int]]:
    """A prompt, a shorter one and what follows both."""
    tokens = [3 + token for token in random_tokens(PROMPT_LEN + NUM_STEPS, seed=1, vocab_size=90)]
    return tokens[:PROMPT_LEN], tokens[: PROMPT_LEN // 2], tokens[PROMPT_LEN:]


def _references(model: PreTrainedModel, plan: PrunePlan) -> tuple[Logits, Logits]:
    """Logits [1 + NUM_STEPS, vocab_size] after either prompt: Hugging Face itself where nothing is pruned."""
    prompt, short_prompt, steps = _prompts()
    if plan.num_tail_layers:
        reference = Reference(model, plan)
        return tuple(reference_logits(reference, own, steps).numpy() for own in (prompt, short_prompt))  # type: ignore
    return tuple(_hf_logits(model, own + steps)[len(own) - 1 :] for own in (prompt, short_prompt))  # type: ignore


@torch.no_grad()
def _hf_logits(model: PreTrainedModel, tokens: list[int]) -> Logits:
    logits: Logits = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    return logits


def _compare_decode(engine: Engine, model: PreTrainedModel, result: FamilyResult) -> None:
    """The decode graph: a whole prompt in one call against Hugging Face, then greedy tokens one by one."""
    prompt, _, _ = _prompts()
    session: Any = engine._session
    logits = session.decode(SlotRange(0, 1), np.array([prompt]), np.zeros(1, np.int64))[0]
    result.errors["decode"] = relative_error(logits, _hf_logits(model, prompt))
    tokens = [int(logits[-1].argmax())]
    for step in range(NUM_STEPS):
        row = session.decode(SlotRange(0, 1), np.array([tokens[-1:]]), np.array([len(prompt) + step]))[0, -1]
        tokens.append(int(row.argmax()))
    expected = list(prompt)
    for _ in tokens:
        expected.append(int(_hf_logits(model, expected)[-1].argmax()))
    result.tokens = {"found": tokens, "expected": expected[len(prompt) :]}


def _compare_prefill(engine: Engine, expected: tuple[Logits, Logits], kind: str, result: FamilyResult) -> None:
    """Two prompts of different lengths, whole and in chunks, then both slots decoded together."""
    prompt, short_prompt, steps = _prompts()
    for chunk_len, way in ((MAX_SEQ_LEN, kind), (CHUNK_LEN, f"{kind}, chunked")):
        with taken_slots(engine, 2) as slots, chunks_of(engine, chunk_len):
            rows = [[engine.prefill(slot, own)] for slot, own in zip(slots, (prompt, short_prompt), strict=True)]
            for token in steps:
                for own, row in zip(rows, engine.decode_step(slots, [token, token]), strict=True):
                    own.append(row)
        errors = [relative_error(np.stack(own), wanted) for own, wanted in zip(rows, expected, strict=True)]
        result.errors[way] = max(errors)


def relative_error(found: Logits, expected: Logits) -> float:
    """Largest absolute difference, in units of the largest expected logit."""
    assert found.shape == expected.shape
    assert np.isfinite(expected).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())
