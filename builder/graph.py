"""One graph of an engine, from a config to a file: trace, passes, lowering."""

from collections import Counter
from collections.abc import Callable, Mapping
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
from pop_engine.builder.export.vision import VisionSpec, trace_vision
from pop_engine.builder.passes.fold_constants import FoldConstants
from pop_engine.builder.passes.managed_weights import DetachWeights
from pop_engine.builder.passes.rms_norm import FuseRmsNorm
from pop_engine.builder.passes.rope import FuseRope
from pop_engine.builder.passes.static_reshape import StaticReshape
from pop_engine.builder.passes.whole_split import DropWholeSplit
from pop_engine.configs.io_contract import Binding, GraphContract
from pop_engine.configs.manifest import PLAN_SUFFIX, DType, Limits, TargetName
from pop_engine.configs.plan_options import PlanOptions
from pop_engine.configs.plan_record import PlanRecord

PRODUCER = "pop-engine"


@dataclass(frozen=True)
class GraphJob:
    """What is needed to build one graph, in a process of its own. `lowered` is the contract after the lowering.

    `plans` says how a plan is compiled, on a target that has plans.
    """

    config: PretrainedConfig
    target: TargetName
    spec: GraphSpec | VisionSpec
    lowered: GraphContract
    layout: WeightLayout
    limits: Limits
    plans: PlanOptions
    out: Path
    dump_dir: Path | None


@dataclass(frozen=True)
class BuiltGraph:
    """A graph on disk, how often each operator occurs in it, and the plan compiled from it, if any."""

    contract: GraphContract
    operators: dict[str, int]
    plan: PlanRecord | None


def build_graph(job: GraphJob, wait_for_weights: Callable[[], object] = lambda: None) -> BuiltGraph:
    """Trace, run the passes, save, compile. Raises EngineError where the model class cannot be traced.

    `wait_for_weights` returns once the weight files are whole, which only a plan that holds them waits for.
    """
    target = target_of(job.target, job.plans.engine_layout)
    model, names = _trace(job.config, job.spec)
    detach = DetachWeights(names)
    passes: list[ir.passes.InPlacePass] = [
        detach,
        FoldConstants(),
        FuseRmsNorm(),
        FuseRope(),
        DropWholeSplit(),
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
    operators = dict(Counter(node.op_type for node in model.graph.all_nodes()).most_common())
    if job.plans.holds_weights:
        wait_for_weights()
    out = job.out.with_suffix(PLAN_SUFFIX)
    per_token = job.spec.patches_per_token if isinstance(job.spec, VisionSpec) else 1
    plan = PlanJob(job.spec.phase, contract, job.limits, job.plans, job.layout, out, per_token)
    return BuiltGraph(contract, operators, target.compile(model, plan))


def _trace(config: PretrainedConfig, spec: GraphSpec | VisionSpec) -> tuple[ir.Model, dict[str, str]]:
    return trace_vision(config, spec) if isinstance(spec, VisionSpec) else trace_graph(config, spec)


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
