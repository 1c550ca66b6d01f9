"""Plans compile without a GPU, for every kind of graph, and hold what the graph says and no weights."""

import re
from pathlib import Path
from typing import Any

import pytest

from pop_engine.builder.compile.tensorrt_plan import compile_plan
from pop_engine.configs.plan_record import PlanRecord
from tensorrt_kit import NUM_LAYERS, Case, LoweredGraphs

# A covering set: GPUs, dtypes, tails of 0, 1 and L - 1, both boundaries, with a window and without, batch 1 and 8.
PLANS = [
    (Case("llama", "prefill", num_tail_layers=0), "sm80", 8),
    (Case("llama", "prefill", num_tail_layers=NUM_LAYERS - 1, dtype="fp16"), "sm89", 1),
    (Case("llama", "prefill", "two-step"), "sm120", 8),
    (Case("gemma3", "prefill"), "sm89", 8),
    (Case("gemma3", "decode", dtype="fp16"), "sm120", 1),
    (Case("llama", "decode"), "sm80", 8),
]
plans = pytest.mark.parametrize(("case", "gpu", "max_batch_size"), PLANS, ids=str)


@plans
def test_a_plan_holds_the_graph_and_no_weights(
    rtx: Any, lowered: LoweredGraphs, tmp_path: Path, case: Case, gpu: str, max_batch_size: int
) -> None:
    graph = lowered(case)
    record = compile_plan(rtx, graph.model(), graph.job(tmp_path / "x.plan", gpu, max_batch_size), gpu)

    assert record.gpu == gpu
    assert record.num_bytes == (tmp_path / "x.plan").stat().st_size
    assert record.contract == graph.contract
    assert len(record.contract.weights) > NUM_LAYERS
    assert sum(constant.num_bytes for constant in record.constants) < 4096
    assert len(record.attentions) == num_attentions(case)
    for attention in record.attentions:
        windowed = case.family == "gemma3" and attention.name != "attention.1"
        assert attention.lengths is not None
        assert attention.causal == ("none" if windowed else "lower-right")
        assert (attention.mask is not None) == windowed
    assert_nothing_is_transposed(record, (tmp_path / "x.plan").read_bytes())


def num_attentions(case: Case) -> int:
    """Two-step prefill attends in the trunk alone; every other graph has all layers, if only for the last row."""
    two_step = case.phase == "prefill" and case.boundary == "two-step"
    return NUM_LAYERS - case.num_tail_layers * two_step


def assert_nothing_is_transposed(record: PlanRecord, plan: bytes) -> None:
    """A plan names its kernels and what they read: none may rewrite a weight in every call."""
    assert b"__myl" in plan, "this TensorRT writes its plans in another form; look for transposed weights there"
    weights = {binding.name for binding in record.contract.weights if len(binding.shape) > 1}
    for first_argument in re.findall(rb"name=__myl_Tran fqn=\S+ args=\{ \"([^\"]+)\"", plan):
        assert first_argument.decode().removesuffix(".1") not in weights


def test_profiles_cover_the_limits(rtx: Any, lowered: LoweredGraphs, tmp_path: Path) -> None:
    graph = lowered(Case("llama", "decode"))
    record = compile_plan(rtx, graph.model(), graph.job(tmp_path / "x.plan"), "sm89")

    assert [(profile.name, profile.dims) for profile in record.profiles] == [
        ("one-token", {"batch": (1, 1, 8), "seq": (1, 1, 1)}),
        ("few-tokens", {"batch": (1, 1, 8), "seq": (2, 4, 8)}),
    ]
