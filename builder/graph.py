"""One graph of an engine, from a config to a file: trace, passes, lowering."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
    TopologicalSortPass,
)
from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.target import target_of
from pop_engine.builder.export.trace import GraphSpec, trace_graph
from pop_engine.builder.passes.fold_constants import FoldConstants
from pop_engine.builder.passes.managed_weights import DetachWeights
from pop_engine.builder.passes.rms_norm import FuseRmsNorm
from pop_engine.builder.passes.rope import FuseRope
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.manifest import TargetName

PRODUCER = "pop-engine"


@dataclass(frozen=True)
class GraphJob:
    """What is needed to build one graph, in a process of its own. `lowered` is the contract after the lowering."""

    config: PretrainedConfig
    target: TargetName
    spec: GraphSpec
    lowered: GraphContract
    layout: WeightLayout
    out: Path
    dump_dir: Path | None


@dataclass(frozen=True)
class BuiltGraph:
    """A graph on disk, and how often each operator occurs in it."""

    contract: GraphContract
    operators: dict[str, int]


def build_graph(job: GraphJob) -> BuiltGraph:
    """Trace, run the passes, save. Raises EngineError where the model class cannot be traced."""
    model, names = trace_graph(job.config, job.spec)
    detach = DetachWeights(names)
    passes: list[ir.passes.InPlacePass] = [
        detach,
        FoldConstants(),
        FuseRmsNorm(),
        FuseRope(),
        StaticReshape(),
        *target_of(job.target).lowering(detach.detached, job.layout),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
        TopologicalSortPass(),
    ]
    for number, graph_pass in enumerate(passes):
        graph_pass(model)
        if job.dump_dir is not None:
            _dump(model, job.dump_dir / f"{job.spec.phase}.{number:02d}.{type(graph_pass).__name__}.txt")
    _check_contract(model, job.lowered)
    model.producer_name = PRODUCER
    ir.save(model, job.out)
    return BuiltGraph(
        contract=job.lowered,
        operators=dict(Counter(node.op_type for node in model.graph).most_common()),
    )


def _check_contract(model: ir.Model, contract: GraphContract) -> None:
    """The graph's bindings are the contract's, and nothing is a binding that the contract does not declare."""
    for values, bindings in ((model.graph.inputs, contract.inputs), (model.graph.outputs, contract.outputs)):
        found, declared = [value.name for value in values], [binding.name for binding in bindings]
        assert found == declared, f"bindings {found} are not the contract's {declared}"


def _dump(model: ir.Model, path: Path) -> None:
    path.write_text("\n".join(str(node) for node in model.graph) + "\n", encoding="utf-8")
