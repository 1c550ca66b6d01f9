"""How much faster than the full engine a POP prefill can be at best (PAPER.md, upper bounds).

A prefill is a list of steps: a trunk layer over all rows, a tail layer's K and V projections over the context rows,
the same layer in full over the last row, the LM head over the last row. Each step counts its matrix products and its
attention, two FLOPs per multiply-add, and the weights it reads. Norms, RoPE, softmax and the embedding are left out
on both sides. Attention is counted without a sliding window, the MLP as gated (three products).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan

_FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True)
class PrefillStep:
    """One part of a prefill that no other overlaps."""

    flops: int
    num_weights: int


@dataclass(frozen=True)
class MachineRates:
    """What the machine was measured to do: a large matrix product, and reading weights from memory."""

    flops_per_second: float
    bytes_per_second: float


def layer_weights(dims: ModelDims) -> int:
    """Weights of one layer's seven matrix products: q, k, v, o, gate, up, down."""
    query_output = 2 * dims.hidden_size * dims.num_attention_heads * dims.head_dim
    return query_output + key_value_weights(dims) + 3 * dims.hidden_size * dims.intermediate_size


def key_value_weights(dims: ModelDims) -> int:
    """Weights of one layer's K and V projections, all that a tail layer needs at prefill."""
    return 2 * dims.hidden_size * dims.num_key_value_heads * dims.head_dim


def attention_flops(dims: ModelDims, first_row: int, num_rows: int) -> int:
    """QK^T and PV of consecutive rows, each over the keys up to its own. Exact: no masked key is counted."""
    num_pairs = num_rows * first_row + num_rows * (num_rows + 1) // 2
    return 2 * _FLOPS_PER_MULTIPLY_ADD * dims.num_attention_heads * dims.head_dim * num_pairs


def prefill_steps(
    dims: ModelDims, plan: PrunePlan, num_tokens: int, boundary: Boundary = "one-pass"
) -> Iterator[PrefillStep]:
    """The steps from a prompt of `num_tokens` to the logits of its last token.

    Both boundaries do the same arithmetic. The two-step form reads the weights of the trunk, and of the tail's K and
    V, a second time for the last row.
    """
    num_context = num_tokens - 1
    if boundary == "two-step":
        for _ in range(plan.num_trunk_layers if num_context else 0):
            yield _full_layer(dims, 0, num_context)
    for _ in range(plan.num_tail_layers if num_context else 0):
        yield _key_value_projections(dims, num_context)
    for layer_idx in range(plan.num_hidden_layers):
        last_row_alone = boundary == "two-step" or layer_idx in plan.tail
        first_row = num_context if last_row_alone else 0
        reads_again = boundary == "two-step" or layer_idx not in plan.tail or not num_context
        yield _full_layer(dims, first_row, num_tokens - first_row, with_key_value_weights=reads_again)
    lm_head = dims.hidden_size * dims.vocab_size
    yield PrefillStep(_FLOPS_PER_MULTIPLY_ADD * lm_head, lm_head)


def prefill_flops(dims: ModelDims, plan: PrunePlan, num_tokens: int) -> int:
    """FLOPs to the first token's logits, the same for both boundaries."""
    return sum(step.flops for step in prefill_steps(dims, plan, num_tokens))


def weight_bytes_read(
    dims: ModelDims, plan: PrunePlan, num_tokens: int, item_bytes: int, boundary: Boundary = "one-pass"
) -> int:
    """Bytes of weights that a prefill must read from memory, if each step reads its own once."""
    return item_bytes * sum(step.num_weights for step in prefill_steps(dims, plan, num_tokens, boundary))


def ttft_bound(dims: ModelDims, plan: PrunePlan, num_tokens: int) -> float:
    """The full engine's FLOPs over POP's: the ratio of their times to first token where arithmetic is all."""
    return prefill_flops(dims, full_plan(plan), num_tokens) / prefill_flops(dims, plan, num_tokens)


def roofline_seconds(
    dims: ModelDims, plan: PrunePlan, num_tokens: int, item_bytes: int, rates: MachineRates, boundary: Boundary
) -> float:
    """Time to first token if each step took the longer of its arithmetic and its weights' way from memory.

    `rates` are to be measured on the machine and the threads of the run: FLOPs per second of a large matrix product
    in the engine's dtype, and bytes per second of a read over more memory than the caches hold.
    """
    return sum(
        max(step.flops / rates.flops_per_second, step.num_weights * item_bytes / rates.bytes_per_second)
        for step in prefill_steps(dims, plan, num_tokens, boundary)
    )


def roofline_bound(
    dims: ModelDims,
    plan: PrunePlan,
    num_tokens: int,
    item_bytes: int,
    rates: MachineRates,
    boundary: Boundary = "one-pass",
) -> float:
    """The bound for short prompts, where a layer over one row costs its weights' bytes, not its FLOPs.

    Never above `ttft_bound`, and well below it where reading the tail's weights is most of the time. It is a ratio
    of two idealised times: products of few rows reach neither rate, so it guides where `ttft_bound` bounds.
    """
    full = roofline_seconds(dims, full_plan(plan), num_tokens, item_bytes, rates, "one-pass")
    return full / roofline_seconds(dims, plan, num_tokens, item_bytes, rates, boundary)


def matmul_bound(dims: ModelDims, plan: PrunePlan) -> float:
    """The paper's limit: the layers' matrix products alone, per context row (no attention, last row or LM head)."""
    kept = plan.num_trunk_layers * layer_weights(dims) + plan.num_tail_layers * key_value_weights(dims)
    return plan.num_hidden_layers * layer_weights(dims) / kept


def full_plan(plan: PrunePlan) -> PrunePlan:
    """The same model with nothing pruned, the baseline of every comparison."""
    return PrunePlan(plan.num_hidden_layers, 0)


def _full_layer(dims: ModelDims, first_row: int, num_rows: int, *, with_key_value_weights: bool = True) -> PrefillStep:
    weights = layer_weights(dims)
    flops = _FLOPS_PER_MULTIPLY_ADD * num_rows * weights + attention_flops(dims, first_row, num_rows)
    return PrefillStep(flops, weights if with_key_value_weights else weights - key_value_weights(dims))


def _key_value_projections(dims: ModelDims, num_rows: int) -> PrefillStep:
    weights = key_value_weights(dims)
    return PrefillStep(_FLOPS_PER_MULTIPLY_ADD * num_rows * weights, weights)
