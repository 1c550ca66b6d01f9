"""What the tests of the TensorRT target share: tiny graphs, lowered as for TensorRT, traced once each."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import pytest
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt import TensorRT
from pop_engine.builder.export.trace import GraphSpec
from pop_engine.builder.graph import GraphJob, build_graph
from pop_engine.configs.io_contract import (
    Boundary,
    CacheShape,
    GraphContract,
    KVShape,
    Phase,
    decode_contract,
    prefill_contract,
)
from pop_engine.configs.manifest import DType, Limits
from pop_engine.configs.prune_plan import PrunePlan

Family = Literal["llama", "gemma3"]

NUM_LAYERS = 3
NUM_KEY_VALUE_HEADS, HEAD_DIM = 2, 64
VOCAB_SIZE = 320
MAX_SEQ_LEN = 64
WINDOW = 16
LIMITS = Limits(MAX_SEQ_LEN, max_batch_size=8, max_prefill_len=32)


def tiny_config(family: Family) -> PretrainedConfig:
    """Three layers; Gemma-3's first and last have a window, its second has none."""
    dims: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
    }
    if family == "llama":
        return LlamaConfig(**dims, tie_word_embeddings=True)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**dims, sliding_window=WINDOW, layer_types=layer_types)


@dataclass(frozen=True)
class Case:
    """One graph."""

    family: Family
    phase: Phase
    boundary: Boundary = "one-pass"
    num_tail_layers: int = 1
    dtype: DType = "bf16"

    def __str__(self) -> str:
        return f"{self.family}-{self.phase}-{self.boundary}-tail{self.num_tail_layers}-{self.dtype}"


@dataclass(frozen=True)
class LoweredGraph:
    """A lowered graph on disk. Every `model()` is a copy of its own, for compiling uses one up."""

    case: Case
    path: Path
    contract: GraphContract

    def model(self) -> ir.Model:
        return ir.load(self.path)

    def job(self, out: Path, gpu: str = "sm89", max_batch_size: int = 8) -> PlanJob:
        limits = replace(LIMITS, max_batch_size=max_batch_size)
        return PlanJob(self.case.phase, self.contract, limits, gpu, out)


class LoweredGraphs:
    """Traces each case once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._graphs: dict[Case, LoweredGraph] = {}

    def __call__(self, case: Case) -> LoweredGraph:
        if case not in self._graphs:
            self._graphs[case] = self._lower(case)
        return self._graphs[case]

    def _lower(self, case: Case) -> LoweredGraph:
        plan = PrunePlan(NUM_LAYERS, case.num_tail_layers)
        contract = _contract(case, plan)
        spec = GraphSpec(case.phase, plan, case.boundary, contract, case.dtype)
        layout = WeightLayout("copy", "weights", case.dtype, {})
        path = self._root / f"{case}.onnx"
        job = GraphJob(tiny_config(case.family), "tensorrt-rtx", spec, contract, layout, LIMITS, "sm89", path, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorRT, "compile", lambda *_: None)
            return LoweredGraph(case, path, build_graph(job).contract)


def _contract(case: Case, plan: PrunePlan) -> GraphContract:
    cache = CacheShape((KVShape(NUM_KEY_VALUE_HEADS, HEAD_DIM),) * NUM_LAYERS, MAX_SEQ_LEN, case.dtype)
    if case.phase == "decode":
        return decode_contract(cache, VOCAB_SIZE)
    return prefill_contract(plan, case.boundary, cache, VOCAB_SIZE, boundary_writes=False, num_boundary=1)
