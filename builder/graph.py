"""One graph of an engine, from a config to a file: trace, passes, lowering."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.target import target_of
from pop_engine.builder.export.trace import GraphSpec, trace_graph
from pop_engine.builder.passes.fold_constants import FoldConstants
from pop_engine.builder.passes.managed_weights import DetachWeights
from pop_engine.builder.passes.rms_norm import FuseRmsNorm
from pop_engine.builder.passes.rope import FuseRope
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.configs.io_contract import Binding, GraphContract
from pop_engine.configs.manifest import PLAN_SUFFIX, DType, Limits, TargetName
from pop_engine.configs.plan_record import PlanRecord

PRODUCER = "pop-engine"


@dataclass(frozen=True)
class GraphJob:
    """What is needed to build one graph, in a process of its own. `lowered` is the contract after the lowering.

    `gpu` is what a plan is compiled for, or none for the GPU that is here.
    """

    config: PretrainedConfig
    target: TargetName
    spec: GraphSpec
    lowered: GraphContract
    layout: WeightLayout
    limits: Limits
    gpu: str | None
    out: Path
    dump_dir: Path | None


@dataclass(frozen=True)
class BuiltGraph:
    """A graph on disk, how often each operator occurs in it, and the plan compiled from it, if any."""

    contract: GraphContract
    operators: dict[str, int]
    plan: PlanRecord | None


def build_graph(job: GraphJob) -> BuiltGraph:
    """Trace, run the passes, save. Raises EngineError where the model class cannot be traced."""
    target = target_of(job.target)
    model, names = trace_graph(job.config, job.spec)
    detach = DetachWeights(names)
    passes: list[ir.passes.InPlacePass] = [
        detach,
        FoldConstants(),
        FuseRmsNorm(),
        FuseRope(),
        StaticReshape(),
        *target.lowering(detach.detached, job.layout),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        RemoveUnusedOpsetsPass(),
        TopologicalSortPass(),
    ]
    for number, graph_pass in enumerate(passes):
        graph_pass(model)
        if job.dump_dir is not None:
            _dump(model, job.dump_dir / f"{job.spec.phase}.{number:02d}.{type(graph_pass).__name__}.txt")
    contract = replace(job.lowered, weights=_weight_inputs(model, detach.detached, job.spec.dtype))
    _check_contract(model, contract)
    model.producer_name = PRODUCER
    ir.save(model, job.out)
    operators = dict(Counter(node.op_type for node in model.graph).most_common())
    plan = PlanJob(job.spec.phase, contract, job.limits, job.gpu, job.out.with_suffix(PLAN_SUFFIX))
    return BuiltGraph(contract, operators, target.compile(model, plan))


def _weight_inputs(model: ir.Model, weights: Mapping[str, ir.Value], dtype: DType) -> tuple[Binding, ...]:
    """The parameters that the lowering has left as inputs of the graph."""
    inputs = set(model.graph.inputs)
    found = ((name, value.shape) for name, value in weights.items() if value in inputs)
    return tuple(Binding(name, tuple(shape.numpy()), dtype) for name, shape in found if shape is not None)


def _check_contract(model: ir.Model, contract: GraphContract) -> None:
    """The graph's bindings are the contract's, and nothing is a binding that the contract does not declare."""
    inputs = (*contract.inputs, *contract.weights)
    for values, bindings in ((model.graph.inputs, inputs), (model.graph.outputs, contract.outputs)):
        found, declared = [value.name for value in values], [binding.name for binding in bindings]
        assert found == declared, f"bindings {found} are not the contract's {declared}"


def _dump(model: ir.Model, path: Path) -> None:
    path.write_text("\n".join(str(node) for node in model.graph) + "\n", encoding="utf-8")
