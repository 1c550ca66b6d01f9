"""Engines on the device, through the API that programs use: numbers, times, and what weights as inputs cost."""

import importlib.util
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pop_engine.builder.pipeline import build
from pop_engine.builder.progress import BuildProgress
from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.manifest import Manifest, TargetName
from pop_engine.runtime import Engine
from pop_engine.tools.bound import ttft_bound
from pop_engine.tools.gpu_check_model import PopDecoder
from pop_engine.tools.gpu_check_plan import Budget, CheckPlan, say
from pop_engine.tools.gpu_check_timing import time_alternating
from pop_engine.tools.spread import Spread

# Relative to the largest logit: what bf16 and fp16 round to over a few dozen layers, and fp32.
TOLERANCES = {"bf16": 0.05, "fp16": 0.02, "fp32": 1e-4}
_NUM_PROMPT_TOKENS, _NUM_DECODE_STEPS = 20, 4
_NUM_DECODED = 8


@dataclass(frozen=True)
class EngineFacts:
    """Which engine. `seconds` is what building it took, none for one that was given."""

    directory: str
    target: str
    layout: str | None
    dtype: str
    boundary: str
    num_tail_layers: int
    num_hidden_layers: int
    seconds: float | None = None


@dataclass(frozen=True)
class EngineNumbers:
    """Largest logit errors against PyTorch in fp32, relative to the largest logit, and how often the best token is it.

    The first logits are prefill's, the others those of decode steps.
    """

    engine: EngineFacts
    prefill_error: float
    decode_error: float
    equal_tokens: float
    passed: bool


@dataclass(frozen=True)
class TtftTime:
    """From the first prompt's tokens to the last one's logits, in milliseconds: slots are filled one after another."""

    batch_size: int
    num_tokens: int
    time: Spread


@dataclass(frozen=True)
class EngineTimes:
    """Time to the first token of every prompt, and of a decode step by batch size in milliseconds."""

    engine: EngineFacts
    ttft: tuple[TtftTime, ...]
    decode: dict[int, Spread]


@dataclass(frozen=True)
class TtftRatio:
    """The full engine's time to first token over an engine's, and the bound of that ratio."""

    batch_size: int
    num_tokens: int
    ratio: float
    bound: float


@dataclass(frozen=True)
class EngineRatios:
    """What an engine gains. The two were timed one after the other: each fills the GPU."""

    engine: EngineFacts
    ttft: tuple[TtftRatio, ...]


def ratios_to_full(full: EngineTimes, times: EngineTimes) -> EngineRatios:
    """Compare an engine with the full one of the same target."""
    manifest = Manifest.load(Path(times.engine.directory))
    of_full = {(row.batch_size, row.num_tokens): row.time.median for row in full.ttft}
    return EngineRatios(
        times.engine,
        tuple(
            TtftRatio(
                row.batch_size,
                row.num_tokens,
                ratio=of_full[row.batch_size, row.num_tokens] / row.time.median,
                bound=ttft_bound(manifest.dims, manifest.plan, row.num_tokens),
            )
            for row in times.ttft
            if (row.batch_size, row.num_tokens) in of_full
        ),
    )


def found_targets() -> list[TargetName]:
    """The GPU targets whose packages are here."""
    found: list[TargetName] = []
    packages: tuple[tuple[TargetName, str], ...] = (("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx"))
    found += [target for target, package in packages if importlib.util.find_spec(package) is not None]
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        found += ["ort-cuda"] if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else []
    return found


def engine_facts(directory: Path, seconds: float | None = None) -> EngineFacts:
    """What an engine's manifest says."""
    manifest = Manifest.load(directory)
    return EngineFacts(
        str(directory),
        manifest.target.name,
        manifest.target.engine_layout,
        manifest.dtype,
        manifest.boundary,
        manifest.plan.num_tail_layers,
        manifest.plan.num_hidden_layers,
        seconds,
    )


@contextmanager
def saved_checkpoint(model: Any) -> Iterator[Path]:
    """The model as a checkpoint folder, for as long as the body runs."""
    with tempfile.TemporaryDirectory(prefix="gpu_check") as folder:
        model.save_pretrained(Path(folder) / "checkpoint")
        yield Path(folder) / "checkpoint"


def build_engine(checkpoint: Path, name: str, options: BuildOptions, budget: Budget, seconds: float) -> EngineFacts:
    """Build beside the checkpoint. `seconds` is what it may take at least. Raises what pop-build would say."""
    budget.require(seconds, f"building {name}")
    say(f"build: {name}")
    started = time.monotonic()
    out = checkpoint.parent / name
    build(BuildConfig(str(checkpoint), out, options, verify=False), BuildProgress(verbose=False))
    return engine_facts(out, round(time.monotonic() - started, 1))


def check_engine_numbers(facts: EngineFacts, model: Any) -> EngineNumbers:
    """A prompt and a few decode steps, against `model` in fp32 on the device that it is on."""
    say(f"numbers: {facts.target} {facts.layout or ''} {facts.boundary}")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, _NUM_PROMPT_TOKENS + _NUM_DECODE_STEPS)
    prompt, steps = [int(token) for token in tokens[:_NUM_PROMPT_TOKENS]], tokens[_NUM_PROMPT_TOKENS:]
    with Engine.load(facts.directory) as engine:
        slot = engine.allocate_slot()
        found = [engine.prefill(slot, prompt), *(engine.decode_step([slot], [int(token)])[0] for token in steps)]
    expected = _expected_logits(model, facts.num_tail_layers, prompt, [int(token) for token in steps])
    logits = np.stack(found)
    errors = np.abs(logits - expected).max(axis=1) / np.abs(expected).max()
    return EngineNumbers(
        facts,
        prefill_error=float(errors[0]),
        decode_error=float(errors[1:].max()),
        equal_tokens=float((logits.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        passed=bool(np.isfinite(logits).all() and errors.max() < TOLERANCES[facts.dtype]),
    )


@torch.no_grad()
def _expected_logits(model: Any, num_tail_layers: int, prompt: list[int], steps: list[int]) -> Any:
    decoder = PopDecoder(model, num_tail_layers, 1, len(prompt) + len(steps))
    device = next(model.parameters()).device
    rows = [decoder.one_pass(torch.tensor([prompt], device=device))]
    for number, token in enumerate(steps):
        rows.append(decoder.decode(torch.tensor([[token]], device=device), len(prompt) + number))
    return torch.cat(rows).float().cpu().numpy()


def check_engine_times(facts: EngineFacts, plan: CheckPlan, budget: Budget) -> EngineTimes:
    """The engine alone in the process. Times run until the logits are on the host."""
    with Engine.load(facts.directory) as engine:
        limits = engine.manifest.limits
        batch_sizes = [size for size in plan.batch_sizes if size <= limits.max_batch_size]
        prompt_lens = [length for length in plan.prompt_lens if length <= limits.max_seq_len]
        ttft = tuple(
            _time_prefill(engine, batch_size, num_tokens, plan, budget)
            for num_tokens in prompt_lens
            for batch_size in batch_sizes
        )
        context_len = min(plan.context_len, limits.max_seq_len - 2 * _NUM_DECODED)
        decode = {size: _time_decode(engine, size, context_len) for size in batch_sizes}
    return EngineTimes(facts, ttft, decode)


def _time_prefill(engine: Engine, batch_size: int, num_tokens: int, plan: CheckPlan, budget: Budget) -> TtftTime:
    budget.require(5 * batch_size, f"time to first token of {batch_size} x {num_tokens} tokens")
    say(f"times: {engine.manifest.target.name} {engine.manifest.boundary}, {batch_size} x {num_tokens} tokens")
    prompt = _prompt(engine, num_tokens)

    def prefill() -> None:
        slots = [engine.allocate_slot() for _ in range(batch_size)]
        for slot in slots:
            engine.prefill(slot, prompt)
        for slot in slots:
            engine.free_slot(slot)

    spread = time_alternating({"prefill": prefill}, "cpu", plan.seconds_per_case)["prefill"]
    return TtftTime(batch_size, num_tokens, spread)


def _time_decode(engine: Engine, batch_size: int, context_len: int) -> Spread:
    """Steps behind `context_len` tokens; the cache grows by a few of them, which costs nothing that shows."""
    slots = [engine.allocate_slot() for _ in range(batch_size)]
    for slot in slots:
        engine.prefill(slot, _prompt(engine, context_len))
    samples: list[float] = []
    for number in range(_NUM_DECODED + 1):
        started = time.perf_counter()
        engine.decode_step(slots, [1] * batch_size)
        # The first step may still record a graph.
        if number:
            samples.append(1000 * (time.perf_counter() - started))
    for slot in slots:
        engine.free_slot(slot)
    return Spread.of(samples)


def _prompt(engine: Engine, num_tokens: int) -> Sequence[int]:
    tokens = np.random.default_rng(1).integers(0, engine.manifest.dims.vocab_size, num_tokens)
    return [int(token) for token in tokens]
