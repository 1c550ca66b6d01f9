"""POP in PyTorch on the device: does it compute the same in bf16, how much does it save, what does decode cost?"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.bound import MachineRates, roofline_bound, ttft_bound
from pop_engine.tools.gpu_check_model import PopDecoder, num_decode_weights
from pop_engine.tools.gpu_check_plan import Budget, CheckPlan, say
from pop_engine.tools.gpu_check_timing import Call, capture, measure_rates, time_alternating
from pop_engine.tools.spread import Spread

DTYPE = torch.bfloat16
_ITEM_BYTES = 2
# One layer of Llama-3.1-8B.
_LAYER_BYTES = 218_112_000 * _ITEM_BYTES
# Above this many rows a call is long against the launching of its kernels, and its graph would hold too much memory.
_MAX_CAPTURED_ROWS = 16_384
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
# Its decoder: the vision tower has no part in a text prompt.
_QWEN3_VL_8B: dict[str, Any] = _LLAMA_8B | {
    "vocab_size": 151_936,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
}


@dataclass(frozen=True)
class NumbersRow:
    """Largest logit differences, in units of the largest expected logit, of a model cut to `num_layers`."""

    model: str
    num_layers: int
    one_pass_to_two_step: float
    one_pass_to_fp32: float


@dataclass(frozen=True)
class ReferenceTtftRow:
    """Time to first token in milliseconds, and full prefill's time over POP's beside the bounds."""

    num_layers: int
    num_tokens: int
    batch_size: int
    full: Spread
    one_pass: Spread
    two_step: Spread
    ratio: float
    two_step_ratio: float
    bound: float
    roofline_bound: float
    captured: bool


@dataclass(frozen=True)
class LeftOut:
    """A size that could not be measured."""

    num_tokens: int
    batch_size: int
    reason: str


@dataclass(frozen=True)
class ReferenceDecodeRow:
    """One decode step, in milliseconds, beside the time that reading its weights once takes."""

    batch_size: int
    context_len: int
    step: Spread
    weights_once_ms: float
    ratio: float


def random_model(kind: str, device: str, *, num_layers: int | None = None, dtype: torch.dtype = DTYPE) -> Any:
    """Random weights in the shape of `tiny`, `llama-3.1-8b` or `qwen3-vl-8b`, the same for every dtype."""
    sizes = {"tiny": _TINY, "llama-3.1-8b": _LLAMA_8B, "qwen3-vl-8b": _QWEN3_VL_8B}[kind]
    sizes = sizes | ({} if num_layers is None else {"num_hidden_layers": num_layers})
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    # Made in bf16: in fp32 an 8B model would not fit where it fits in bf16.
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(device):
            model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes)) if kind == "qwen3-vl-8b" else _llama(sizes)
    finally:
        torch.set_default_dtype(before)
    # Its parameters alone: rotary frequencies are buffers, and stay in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


def _llama(sizes: dict[str, Any]) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes))


def fitting_model(plan: CheckPlan) -> Any:
    """Llama-3.1-8B's shape, with as many of its layers as half of the device's memory holds."""
    if plan.is_tiny:
        return random_model("tiny", plan.device)
    total = torch.cuda.get_device_properties(plan.device).total_memory
    embeddings = 2 * _LLAMA_8B["vocab_size"] * _LLAMA_8B["hidden_size"] * _ITEM_BYTES
    num_layers = min(int((total / 2 - embeddings) / _LAYER_BYTES), _LLAMA_8B["num_hidden_layers"])
    return random_model("llama-3.1-8b", plan.device, num_layers=max(num_layers, 3))


def dims_of(config: PretrainedConfig) -> ModelDims:
    """The dimensions that a bound is computed from."""
    names: tuple[str, ...] = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    )
    names += ("head_dim", "vocab_size", "max_position_embeddings")
    return ModelDims(config.model_type, **{name: getattr(config, name) for name in names})


@torch.no_grad()
def check_numbers(plan: CheckPlan, budget: Budget) -> list[NumbersRow]:
    """Both boundaries against each other in bf16, and against fp32 on the same weights, in models of few layers."""
    rows: list[NumbersRow] = []
    for kind in ("tiny",) if plan.is_tiny else ("llama-3.1-8b", "qwen3-vl-8b"):
        budget.require(20, f"numbers of {kind}")
        say(f"numbers: {kind}")
        num_layers = 3
        tokens = _tokens(dims_of(random_model("tiny", "cpu").config), 1, plan.context_len, plan.device)
        found = {}
        for dtype in (DTYPE, torch.float32):
            model = random_model(kind, plan.device, num_layers=num_layers, dtype=dtype)
            decoder = PopDecoder(model, 1, 1, plan.context_len)
            found[dtype] = (decoder.one_pass(tokens).float(), decoder.two_step(tokens).float())
            del model, decoder
        (one_pass, two_step), (expected, _) = found[DTYPE], found[torch.float32]
        errors = (_relative_error(one_pass, two_step), _relative_error(one_pass, expected))
        rows.append(NumbersRow(kind, num_layers, *errors))
    return rows


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def check_ttft(
    model: Any, rates: MachineRates, plan: CheckPlan, budget: Budget
) -> Iterator[ReferenceTtftRow | LeftOut]:
    """Full, one-pass and two-step prefill, taking turns. A size that does not fit into memory is left out."""
    for batch_size in plan.batch_sizes:
        for num_tokens in plan.prompt_lens:
            budget.require(15, f"time to first token of {num_tokens} tokens, batch {batch_size}")
            say(f"time to first token: {num_tokens} tokens, batch {batch_size}")
            try:
                yield _time_ttft(model, rates, plan, num_tokens, batch_size)
            except torch.OutOfMemoryError as error:
                yield LeftOut(num_tokens, batch_size, str(error))


def _time_ttft(model: Any, rates: MachineRates, plan: CheckPlan, num_tokens: int, batch_size: int) -> ReferenceTtftRow:
    dims = dims_of(model.config)
    prune = PrunePlan.last_third(dims.num_hidden_layers)
    tokens = _tokens(dims, batch_size, num_tokens, plan.device)
    decoder = PopDecoder(model, prune.num_tail_layers, batch_size, num_tokens)
    calls = {form: partial(getattr(decoder, form), tokens) for form in ("full", "one_pass", "two_step")}
    is_captured = plan.device != "cpu" and batch_size * num_tokens <= _MAX_CAPTURED_ROWS
    with _captured(calls, is_captured) as timed:
        times = time_alternating(timed, plan.device, plan.seconds_per_case)
    return ReferenceTtftRow(
        dims.num_hidden_layers,
        num_tokens,
        batch_size,
        **times,
        ratio=times["full"].median / times["one_pass"].median,
        two_step_ratio=times["full"].median / times["two_step"].median,
        bound=ttft_bound(dims, prune, num_tokens),
        roofline_bound=_batch_roofline(dims, prune, num_tokens, batch_size, rates),
        captured=is_captured,
    )


@torch.no_grad()
def check_decode(model: Any, rates: MachineRates, plan: CheckPlan, budget: Budget) -> Iterator[ReferenceDecodeRow]:
    """A decode step behind `context_len` tokens."""
    dims = dims_of(model.config)
    weights_once_ms = 1000 * num_decode_weights(model) * _ITEM_BYTES / rates.bytes_per_second
    for batch_size in plan.batch_sizes:
        budget.require(10, f"decode at batch {batch_size}")
        say(f"decode: batch {batch_size}")
        decoder = PopDecoder(model, 0, batch_size, plan.context_len + 1)
        decoder.full(_tokens(dims, batch_size, plan.context_len, plan.device))
        token = _tokens(dims, batch_size, 1, plan.device)
        calls: dict[str, Call] = {"step": partial(decoder.decode, token, plan.context_len)}
        with _captured(calls, plan.device != "cpu") as timed:
            step = time_alternating(timed, plan.device, plan.seconds_per_case)["step"]
        yield ReferenceDecodeRow(batch_size, plan.context_len, step, weights_once_ms, step.median / weights_once_ms)


def reference_rates(plan: CheckPlan) -> MachineRates:
    """What the device does at best."""
    return measure_rates(plan.device, DTYPE, plan.seconds_per_case, is_tiny=plan.is_tiny)


@contextmanager
def _captured(calls: Mapping[str, Callable[[], Any]], is_captured: bool) -> Iterator[dict[str, Call]]:
    """The calls, as CUDA graphs where asked; their memory is given back at the end."""
    timed: dict[str, Call] = {name: capture(call) for name, call in calls.items()} if is_captured else dict(calls)
    try:
        yield timed
    finally:
        timed.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _batch_roofline(dims: ModelDims, plan: PrunePlan, num_tokens: int, batch_size: int, rates: MachineRates) -> float:
    """A batch does its arithmetic per sequence and reads the weights once."""
    shared = MachineRates(rates.flops_per_second / batch_size, rates.bytes_per_second)
    return roofline_bound(dims, plan, num_tokens, _ITEM_BYTES, shared)


def _tokens(dims: ModelDims, batch_size: int, num_tokens: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, dims.vocab_size, (batch_size, num_tokens), generator=generator).to(device)
