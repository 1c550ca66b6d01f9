"""The bounds against the paper's figures, and the counts against counting by hand."""

import pytest

from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.bound import (
    MachineRates,
    key_value_weights,
    layer_weights,
    matmul_bound,
    prefill_flops,
    prefill_steps,
    roofline_bound,
    ttft_bound,
    weight_bytes_read,
)

LLAMA = ModelDims("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
QWEN = ModelDims("qwen3_vl_text", 36, 4096, 12288, 32, 8, 128, 151936, 262144)
GEMMA = ModelDims("gemma3_text", 48, 3840, 15360, 16, 8, 256, 262208, 131072)
SMOLLM = ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192)
TINY = ModelDims("llama", 3, 8, 16, 4, 2, 3, 10, 64)


@pytest.mark.parametrize(
    ("dims", "num_tail_layers", "bound", "key_value_percent"),
    [(LLAMA, 10, 1.43, 3.9), (QWEN, 12, 1.47, 4.4), (GEMMA, 16, 1.45, 7.0)],
)
def test_the_paper_bounds(dims: ModelDims, num_tail_layers: int, bound: float, key_value_percent: float) -> None:
    assert round(matmul_bound(dims, PrunePlan(dims.num_hidden_layers, num_tail_layers)), 2) == bound
    # PAPER.md rounds Llama's 3.85 % up and Qwen's 4.35 % up.
    assert abs(100 * key_value_weights(dims) / layer_weights(dims) - key_value_percent) <= 0.06


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
@pytest.mark.parametrize("num_tail_layers", [0, 1, 2])
def test_flops_equal_counting_product_by_product(num_tokens: int, num_tail_layers: int) -> None:
    def product(rows: int, inner: int, columns: int) -> int:
        return 2 * rows * inner * columns

    query_size, key_size = 4 * 3, 2 * 3
    expected = product(1, 8, 10)
    for layer_idx in range(3):
        is_tail = layer_idx >= 3 - num_tail_layers
        for row in range(num_tokens):
            expected += 2 * product(1, 8, key_size)
            if is_tail and row < num_tokens - 1:
                continue
            expected += product(1, 8, query_size) + product(1, query_size, 8) + 3 * product(1, 8, 16)
            for _ in range(4):
                expected += product(1, 3, row + 1) + product(1, row + 1, 3)
    assert prefill_flops(TINY, PrunePlan(3, num_tail_layers), num_tokens) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 7])
def test_both_boundaries_do_the_same_arithmetic(num_tokens: int) -> None:
    plan = PrunePlan(3, 1)
    two_step = sum(step.flops for step in prefill_steps(TINY, plan, num_tokens, "two-step"))
    assert two_step == prefill_flops(TINY, plan, num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "boundary", "num_trunk_reads", "num_key_value_reads"),
    [(7, "one-pass", 1, 0), (7, "two-step", 2, 1), (1, "one-pass", 1, 0), (1, "two-step", 1, 0)],
)
def test_weights_read(num_tokens: int, boundary: Boundary, num_trunk_reads: int, num_key_value_reads: int) -> None:
    """One-pass reads every weight once; two-step reads the trunk and the tail's K and V again for the last row."""
    expected = 4 * (
        8 * 10 + (2 * num_trunk_reads + 1) * layer_weights(TINY) + num_key_value_reads * key_value_weights(TINY)
    )
    assert weight_bytes_read(TINY, PrunePlan(3, 1), num_tokens, 4, boundary) == expected


def test_ttft_bound_grows_with_the_prompt_from_one() -> None:
    plan = PrunePlan(30, 10)
    bounds = [ttft_bound(SMOLLM, plan, num_tokens) for num_tokens in (1, 2, 32, 512, 2048, 8192)]
    assert bounds[0] == 1
    assert bounds == sorted(bounds)
    assert bounds[2] < matmul_bound(SMOLLM, plan) < 1.5
    # Attention is pruned altogether, so it lifts the bound of a long prompt towards L / K.
    assert matmul_bound(SMOLLM, plan) < bounds[-1] < 1.5
    assert ttft_bound(SMOLLM, PrunePlan(30, 0), 512) == 1


def test_roofline_is_the_flops_bound_where_memory_is_free_and_one_where_arithmetic_is() -> None:
    plan = PrunePlan(30, 10)
    compute, memory = MachineRates(1e9, 1e30), MachineRates(1e30, 1e9)
    assert roofline_bound(SMOLLM, plan, 512, 4, compute) == pytest.approx(ttft_bound(SMOLLM, plan, 512))
    assert roofline_bound(SMOLLM, plan, 512, 4, memory) == pytest.approx(1)
    assert roofline_bound(SMOLLM, plan, 512, 4, memory, "two-step") < 0.7


@pytest.mark.parametrize("balance", [1, 10, 100])
@pytest.mark.parametrize("num_tokens", [1, 2, 32, 512, 2048])
def test_roofline_is_never_above_the_flops_bound(num_tokens: int, balance: int) -> None:
    plan, rates = PrunePlan(30, 10), MachineRates(balance * 10e9, 10e9)
    roofline = roofline_bound(SMOLLM, plan, num_tokens, 4, rates)
    assert 0.9 < roofline <= ttft_bound(SMOLLM, plan, num_tokens) + 1e-12


def test_roofline_tells_short_prompts_from_long_ones() -> None:
    plan, rates = PrunePlan(30, 10), MachineRates(100e9, 10e9)
    assert 1 < roofline_bound(SMOLLM, plan, 32, 4, rates) < 1.2 < roofline_bound(SMOLLM, plan, 512, 4, rates)
