"""Plans compile without a GPU, for every kind of graph, and hold what the graph says and no weights."""

import re
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from pop_engine.builder.compile.tensorrt_plan import compile_plan
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import DType
from pop_engine.configs.plan_record import PlanRecord
from tensorrt_kit import DEEP, NUM_LAYERS, Case, LoweredGraphs

GPUS, BATCHES = ("sm80", "sm89", "sm120"), (1, 8)
DTYPES: tuple[DType, ...] = ("bf16", "fp16")
TAILS = ("none", "ten", "all but one")
BOUNDARIES: tuple[Boundary, ...] = ("one-pass", "two-step")


@dataclass(frozen=True)
class Setting:
    """One engine's plan, by what can be chosen. `max_batch_size` is in a decode plan's profiles, and recorded."""

    tail: str
    gpu: str
    dtype: DType
    boundary: Boundary
    windowed: bool
    max_batch_size: int

    def case(self) -> Case:
        """Few layers where those will do; with windows Gemma-3, or Mistral, which is traced faster, where many."""
        num_layers = DEEP if self.tail == "ten" else NUM_LAYERS
        num_tail_layers = {"none": 0, "ten": 10, "all but one": num_layers - 1}[self.tail]
        windowed = "mistral" if num_layers == DEEP else "gemma3"
        family = windowed if self.windowed else "llama"
        return Case(family, "prefill", self.boundary, num_tail_layers, self.dtype, num_layers)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.case()}-{self.gpu}-{self.max_batch_size}"


# Every pair of choices is here, in six graphs; `make test-all` compiles every combination.
PAIRS = (
    Setting("none", "sm80", "bf16", "two-step", False, 8),
    Setting("none", "sm120", "bf16", "two-step", False, 1),
    Setting("none", "sm89", "fp16", "one-pass", True, 1),
    Setting("none", "sm80", "fp16", "one-pass", True, 8),
    Setting("ten", "sm80", "bf16", "one-pass", False, 1),
    Setting("ten", "sm89", "bf16", "one-pass", False, 8),
    Setting("ten", "sm120", "fp16", "two-step", True, 8),
    Setting("ten", "sm89", "fp16", "two-step", True, 1),
    Setting("all but one", "sm89", "fp16", "two-step", False, 8),
    Setting("all but one", "sm120", "fp16", "two-step", False, 1),
    Setting("all but one", "sm80", "bf16", "one-pass", True, 1),
    Setting("all but one", "sm120", "bf16", "one-pass", True, 8),
)
ALL = tuple(Setting(*choices) for choices in product(TAILS, GPUS, DTYPES, BOUNDARIES, (False, True), BATCHES))
DECODE = (
    (Case("llama", "decode"), "sm80", 8),
    (Case("llama", "decode"), "sm89", 1),
    (Case("gemma3", "decode", dtype="fp16"), "sm120", 1),
    (Case("gemma3", "decode", dtype="fp16"), "sm89", 8),
)


def test_all_pairs_of_choices_are_covered() -> None:
    def pairs(settings: tuple[Setting, ...]) -> set[Any]:
        return {pair for setting in settings for pair in combinations(vars(setting).items(), 2)}

    assert pairs(PAIRS) == pairs(ALL)
    assert len({setting.case() for setting in PAIRS}) == 6


def _compiled(rtx: Any, lowered: LoweredGraphs, folder: Path, case: Case, gpu: str, max_batch_size: int) -> PlanRecord:
    """Compile one plan and check all that is true of every plan."""
    graph = lowered(case)
    record = compile_plan(rtx, graph.model(), graph.job(folder / "x.plan", gpu, max_batch_size), gpu)

    assert record.gpu == gpu
    assert record.num_bytes == (folder / "x.plan").stat().st_size
    assert record.contract == graph.contract
    assert len(record.contract.weights) > case.num_layers
    assert record.weights_inside.count == 0
    assert sum(constant.num_bytes for constant in record.constants) < 4096 * case.num_layers
    assert len(record.attentions) == num_attentions(case)
    for attention in record.attentions:
        windowed = case.has_window(int(attention.name.removeprefix("attention.")))
        assert attention.lengths is not None
        assert attention.causal == ("none" if windowed else "lower-right")
        assert (attention.mask is not None) == windowed
    assert_nothing_is_transposed(record, (folder / "x.plan").read_bytes())
    return record


@pytest.mark.parametrize("setting", PAIRS, ids=str)
def test_a_prefill_plan_holds_the_graph_and_no_weights(
    rtx: Any, lowered: LoweredGraphs, tmp_path: Path, setting: Setting
) -> None:
    _compiled(rtx, lowered, tmp_path, setting.case(), setting.gpu, setting.max_batch_size)


@pytest.mark.nightly
@pytest.mark.parametrize("setting", [setting for setting in ALL if setting not in PAIRS], ids=str)
def test_every_combination(rtx: Any, lowered: LoweredGraphs, tmp_path: Path, setting: Setting) -> None:
    """The prefill plan, and the decode plan beside it."""
    for case in (setting.case(), replace(setting.case(), phase="decode", boundary="one-pass", num_tail_layers=1)):
        _compiled(rtx, lowered, tmp_path, case, setting.gpu, setting.max_batch_size)


@pytest.mark.parametrize(("case", "gpu", "max_batch_size"), DECODE, ids=str)
def test_a_decode_plan_has_profiles_for_one_token_and_for_few(
    rtx: Any, lowered: LoweredGraphs, tmp_path: Path, case: Case, gpu: str, max_batch_size: int
) -> None:
    record = _compiled(rtx, lowered, tmp_path, case, gpu, max_batch_size)

    assert [(profile.name, profile.dims) for profile in record.profiles] == [
        ("one-token", {"batch": (1, 1, max_batch_size), "seq": (1, 1, 1)}),
        ("few-tokens", {"batch": (1, 1, max_batch_size), "seq": (2, 4, 8)}),
    ]


def num_attentions(case: Case) -> int:
    """Two-step prefill attends in the trunk alone, and without logits nobody reads the last layer's attention.

    Every other graph has all layers, if only for the last row.
    """
    two_step = case.phase == "prefill" and case.boundary == "two-step"
    return case.num_layers - max(case.num_tail_layers, 1) * two_step


def assert_nothing_is_transposed(record: PlanRecord, plan: bytes) -> None:
    """A plan names its kernels and what they read: none may rewrite a weight in every call."""
    assert b"__myl" in plan, "this TensorRT writes its plans in another form; look for transposed weights there"
    weights = {binding.name for binding in record.contract.weights if len(binding.shape) > 1}
    for first_argument in re.findall(rb"name=__myl_Tran fqn=\S+ args=\{ \"([^\"]+)\"", plan):
        assert first_argument.decode().removesuffix(".1") not in weights
