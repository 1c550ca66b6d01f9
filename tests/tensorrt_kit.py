"""What the tests of the TensorRT target share: tiny graphs, lowered as for TensorRT, traced once each."""

import fcntl
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import pytest
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PretrainedConfig

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
from pop_engine.configs.plan_options import PlanOptions
from pop_engine.configs.prune_plan import PrunePlan

# Mistral has a window in every layer, Gemma-3 in all but its second.
Family = Literal["llama", "mistral", "gemma3"]

# What most cases have, and what a tail of 10 layers needs.
NUM_LAYERS, DEEP = 3, 12
NUM_KEY_VALUE_HEADS, HEAD_DIM = 2, 64
VOCAB_SIZE = 320
MAX_SEQ_LEN = 64
WINDOW = 16
EMPTY = WeightLayout("copy", "weights", "bf16", {})
LIMITS = Limits(MAX_SEQ_LEN, max_batch_size=8, max_prefill_len=32)


def tiny_config(family: Family, num_layers: int = NUM_LAYERS) -> PretrainedConfig:
    """Random weights' config, small enough to trace in seconds."""
    dims: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KEY_VALUE_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
    }
    if family == "llama":
        return LlamaConfig(**dims, tie_word_embeddings=True)
    if family == "mistral":
        return MistralConfig(**dims, sliding_window=WINDOW)
    layer_types = ["full_attention" if idx == 1 else "sliding_attention" for idx in range(num_layers)]
    return Gemma3TextConfig(**dims, sliding_window=WINDOW, layer_types=layer_types)


@dataclass(frozen=True)
class Case:
    """One graph."""

    family: Family
    phase: Phase
    boundary: Boundary = "one-pass"
    num_tail_layers: int = 1
    dtype: DType = "bf16"
    num_layers: int = NUM_LAYERS

    def __str__(self) -> str:
        tail = f"{self.num_tail_layers}of{self.num_layers}"
        return f"{self.family}-{self.phase}-{self.boundary}-{tail}-{self.dtype}"

    def has_window(self, layer_idx: int) -> bool:
        return self.family == "mistral" or (self.family == "gemma3" and layer_idx != 1)


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
        return PlanJob(self.case.phase, self.contract, limits, PlanOptions(gpu=gpu), EMPTY, out)


class LoweredGraphs:
    """Traces each case once, for all the processes that share the folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._graphs: dict[Case, LoweredGraph] = {}

    def __call__(self, case: Case) -> LoweredGraph:
        if case not in self._graphs:
            with (self._root / f"{case}.contract").open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                path, written = self._root / f"{case}.onnx", file.read()
                contract = pickle.loads(written) if written else self._lower(case, path)
                if not written:
                    file.write(pickle.dumps(contract))
            self._graphs[case] = LoweredGraph(case, path, contract)
        return self._graphs[case]

    def _lower(self, case: Case, path: Path) -> GraphContract:
        plan = PrunePlan(case.num_layers, case.num_tail_layers)
        contract = _contract(case, plan)
        spec = GraphSpec(case.phase, plan, case.boundary, contract, case.dtype)
        plans = PlanOptions(gpu="sm89")
        job = GraphJob(
            tiny_config(case.family, case.num_layers), "tensorrt-rtx", spec, contract, EMPTY, LIMITS, plans, path, None
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorRT, "compile", lambda *_: None)
            return build_graph(job).contract


def _contract(case: Case, plan: PrunePlan) -> GraphContract:
    cache = CacheShape((KVShape(NUM_KEY_VALUE_HEADS, HEAD_DIM),) * case.num_layers, MAX_SEQ_LEN, case.dtype)
    if case.phase == "decode":
        return decode_contract(cache, VOCAB_SIZE)
    return prefill_contract(plan, case.boundary, cache, VOCAB_SIZE, boundary_writes=False, num_boundary=1)
