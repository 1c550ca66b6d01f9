"""Trace one of the two graphs from a Hugging Face model class."""

import logging
import warnings
from contextlib import nullcontext
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import nn
from transformers import PretrainedConfig

from pop_engine.builder.export.attention import IMPLEMENTATION, register_attention
from pop_engine.builder.export.boundary import ContextRows, OnePassTail, TwoStepTail
from pop_engine.builder.export.cache import RecordingCache
from pop_engine.builder.export.calibrated_tail import CalibratedTail, calibrated_shapes
from pop_engine.builder.export.failure import first_line
from pop_engine.builder.export.model import (
    TORCH_DTYPES,
    FakeModel,
    add_parameters,
    build_fake_model,
    decoder_layers,
    lm_head,
)
from pop_engine.builder.export.rotary import hold_rotary
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError, PopError
from pop_engine.configs.manifest import DType
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.plugins import attention as attention_op

OPSET_VERSION = 24
# Any sizes do, if they differ and are neither 0 nor 1, which torch.export would take for constants.
_EXAMPLE_SIZES = {io.BATCH: 2, io.SEQ: 7, io.NUM_CONTEXT: 4, io.NUM_BOUNDARY: 3}


@dataclass(frozen=True)
class GraphSpec:
    """Which graph to trace. Decode is the full model over every row; prefill follows the plan and the boundary.

    `calibrated` gives the context rows of prefill's tail projections of their own; decode has no such rows.
    """

    phase: io.Phase
    plan: PrunePlan
    boundary: io.Boundary
    contract: io.GraphContract
    dtype: DType
    calibrated: bool = False

    @property
    def max_seq_len(self) -> int:
        """How long a sequence can get."""
        max_seq_len = next(b.shape[2] for b in self.contract.inputs if b.name == io.past_key(0))
        assert isinstance(max_seq_len, int)
        return max_seq_len


class GraphModule(nn.Module):
    """The model between the bindings of one graph's contract."""

    def __init__(self, spec: GraphSpec, fake: FakeModel, cache: RecordingCache, *, keeps_rows: bool = False) -> None:
        super().__init__()
        self.model = fake.model
        self._spec = spec
        self._cache = cache
        self._one_pass: OnePassTail | None = None
        self._keeps_rows = keeps_rows
        if spec.phase == "prefill":
            self._wrap_tail(decoder_layers(fake.model), _context_rows(spec, fake))

    def _wrap_tail(self, layers: list[nn.Module], context_rows: ContextRows) -> None:
        tail = [layers[layer_idx] for layer_idx in self._spec.plan.tail]
        if self._spec.boundary == "two-step":
            TwoStepTail(context_rows).wrap(tail)
        else:
            head = lm_head(self.model) if self._keeps_rows else None
            self._one_pass = OnePassTail(self._cache, context_rows, head)
            self._one_pass.wrap(tail, layers[-1])

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors in the order of the contract's inputs; returns the contract's outputs."""
        given = dict(zip((binding.name for binding in self._spec.contract.inputs), tensors, strict=True))
        input_ids = given[io.INPUT_IDS]
        past = [
            (given[io.past_key(layer_idx)], given[io.past_value(layer_idx)])
            for layer_idx in range(len(self._cache.recording))
        ]
        self._cache.begin(past, given[io.CACHE_LEN], input_ids.shape[1])
        if self._one_pass is not None:
            self._one_pass.begin(given.get(io.CONTEXT_ROWS), given[io.BOUNDARY_ROWS])
        logits = self.model(
            input_ids=input_ids, position_ids=given[io.POSITION_IDS], cache=self._cache, use_cache=True
        ).logits
        has_logits = any(binding.name == io.LOGITS for binding in self._spec.contract.outputs)
        return (*([logits] if has_logits else []), *self._cache.presents())


def _context_rows(spec: GraphSpec, fake: FakeModel) -> ContextRows:
    if not spec.calibrated:
        return nullcontext
    parameters = add_parameters(fake, calibrated_shapes(fake.model, spec.plan), spec.dtype)
    return CalibratedTail(fake.model, spec.plan, parameters).context_rows


def trace_graph(config: PretrainedConfig, spec: GraphSpec) -> tuple[ir.Model, dict[str, str]]:
    """Trace a graph. No weight is read or allocated: initializers are fake.

    Returns the model, its inputs and outputs named by the contract, and the map from the initializers' names to the
    checkpoint's. Raises EngineError where the model class cannot be traced, or does not attend through transformers'
    attention interface.
    """
    try:
        module, fake = _graph_module(config, spec)
        model = _export(module, fake, spec)
    except PopError:
        raise
    except Exception as error:
        raise EngineError(
            f"model type {config.model_type}: the {spec.phase} graph cannot be traced ({first_line(error)}); "
            "--verbose shows where"
        ) from error
    _name_bindings(model, spec.contract)
    _check_attentions(model, spec, type(fake.model).__name__)
    _check_positions(model, type(fake.model).__name__)
    return model, {f"model.{name}": canonical for name, canonical in fake.canonical_names.items()}


def _graph_module(config: PretrainedConfig, spec: GraphSpec) -> tuple[GraphModule, FakeModel]:
    """The module to export. A model that cannot lose rows in its layers keeps them up to the head."""
    module, fake = _make_module(config, spec, keeps_rows=False)
    if spec.phase == "prefill" and spec.boundary == "one-pass":
        try:
            with fake.mode, torch.no_grad():
                module(*_example_inputs(fake, spec))
        except (RuntimeError, ValueError):
            return _make_module(config, spec, keeps_rows=True)
    return module, fake


def _make_module(config: PretrainedConfig, spec: GraphSpec, *, keeps_rows: bool) -> tuple[GraphModule, FakeModel]:
    cache = RecordingCache(spec.plan.num_hidden_layers)
    register_attention(cache)
    fake = build_fake_model(config, spec.dtype, IMPLEMENTATION)
    hold_rotary(fake.model, spec.max_seq_len)
    return GraphModule(spec, fake, cache, keeps_rows=keeps_rows), fake


def _export(module: GraphModule, fake: FakeModel, spec: GraphSpec) -> ir.Model:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
        program = torch.export.export(
            module, _example_inputs(fake, spec), dynamic_shapes=(_dynamic_shapes(spec.contract),), strict=False
        )
        # The tail's discarded attention and FFN go before the slow decompositions, not after.
        program.graph_module.graph.eliminate_dead_code()
        exported = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=OPSET_VERSION, verbose=False)
    assert exported is not None
    return exported.model


def _example_inputs(fake: FakeModel, spec: GraphSpec) -> tuple[torch.Tensor, ...]:
    dtypes = {"int64": torch.int64}
    with fake.mode:
        return tuple(
            torch.zeros(
                [dim if isinstance(dim, int) else _EXAMPLE_SIZES[dim] for dim in binding.shape],
                dtype=dtypes.get(binding.dtype, TORCH_DTYPES[spec.dtype]),
            )
            for binding in spec.contract.inputs
        )


def _dynamic_shapes(contract: io.GraphContract) -> tuple[dict[int, torch.export.Dim], ...]:
    dims = {name: torch.export.Dim(name, min=1, max=1 << 20) for name in _EXAMPLE_SIZES}
    return tuple(
        {axis: dims[dim] for axis, dim in enumerate(binding.shape) if isinstance(dim, str)}
        for binding in contract.inputs
    )


def _name_bindings(model: ir.Model, contract: io.GraphContract) -> None:
    """Give inputs and outputs the contract's names, and their dynamic dimensions too."""
    renamed: dict[str, str] = {}
    for value, binding in zip(model.graph.inputs, contract.inputs, strict=True):
        value.name = binding.name
        assert value.shape is not None
        for traced, dim in zip(value.shape, binding.shape, strict=True):
            if isinstance(traced, ir.SymbolicDim) and isinstance(dim, str):
                renamed[str(traced.value)] = dim
    for value, binding in zip(model.graph.outputs, contract.outputs, strict=True):
        value.name = binding.name
    for value in _all_values(model.graph):
        if value.shape is not None and any(isinstance(dim, ir.SymbolicDim) for dim in value.shape):
            value.shape = ir.Shape(
                [renamed.get(str(d.value), d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            )


def _all_values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(output for node in graph for output in node.outputs)]


def _check_attentions(model: ir.Model, spec: GraphSpec, class_name: str) -> None:
    found = sum(attention_op.Attention.match(node) is not None for node in model.graph)
    two_step = spec.phase == "prefill" and spec.boundary == "two-step"
    # Without logits nobody reads what the last layer attends to, tail or not.
    expected = spec.plan.num_hidden_layers - max(spec.plan.num_tail_layers, 1) * two_step
    if found != expected:
        raise EngineError(
            f"{class_name}: {found} of {expected} layers attend through transformers' attention interface; "
            "a model class with attention of its own cannot be exported"
        )


def _check_positions(model: ir.Model, class_name: str) -> None:
    positions = next(value for value in model.graph.inputs if value.name == io.POSITION_IDS)
    if not positions.uses():
        raise EngineError(f"{class_name}: makes no use of position_ids, so it counts positions in a way of its own")
