"""Trace one of the two graphs from a Hugging Face model class."""

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
from pop_engine.builder.export.failure import tracing
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.builder.export.image_rows import DeepStack, embed_rows
from pop_engine.builder.export.model import FakeModel, add_parameters, build_fake_model, decoder_layers, lm_head
from pop_engine.builder.export.onnx_export import DynamicDim, example_inputs, export_module
from pop_engine.builder.export.rotary import hold_rotary
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import DType
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.plugins import attention as attention_op

_DIMS = {
    io.BATCH: DynamicDim(2),
    io.SEQ: DynamicDim(7),
    io.NUM_CONTEXT: DynamicDim(4),
    io.NUM_BOUNDARY: DynamicDim(3),
}


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

    @property
    def num_deepstack(self) -> int:
        """How many layers get image features added to their output."""
        features = next((b.shape[0] for b in self.contract.inputs if b.name == io.DEEPSTACK_EMBEDS), 0)
        assert isinstance(features, int)
        return features


class GraphModule(nn.Module):
    """The model between the bindings of one graph's contract."""

    def __init__(self, spec: GraphSpec, fake: FakeModel, cache: RecordingCache, *, keeps_rows: bool = False) -> None:
        super().__init__()
        self.model = fake.model
        self._spec = spec
        self._cache = cache
        self._one_pass: OnePassTail | None = None
        self._keeps_rows = keeps_rows
        self._deepstack = DeepStack()
        family = vision_family(fake.model.config)
        self._sees_images_whole = family is not None and family.image_attention == "bidirectional"
        layers = decoder_layers(fake.model)
        self._deepstack.wrap(layers[: spec.num_deepstack])
        if spec.phase == "prefill":
            self._wrap_tail(layers, _context_rows(spec, fake))

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
        image_ids = given[io.IMAGE_IDS] if self._sees_images_whole else None
        self._cache.begin(past, given[io.CACHE_LEN], input_ids.shape[1], image_ids)
        if self._one_pass is not None:
            self._one_pass.begin(given.get(io.CONTEXT_ROWS), given[io.BOUNDARY_ROWS])
        logits = self.model(
            **self._rows(given), position_ids=given[io.POSITION_IDS], cache=self._cache, use_cache=True
        ).logits
        has_logits = any(binding.name == io.LOGITS for binding in self._spec.contract.outputs)
        return (*([logits] if has_logits else []), *self._cache.presents())

    def _rows(self, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's argument that says what its rows are."""
        if io.IMAGE_IDS not in given:
            return {"input_ids": given[io.INPUT_IDS]}
        if io.DEEPSTACK_EMBEDS in given:
            self._deepstack.begin(given[io.DEEPSTACK_EMBEDS])
        tokens = (given[io.INPUT_IDS], given[io.IMAGE_IDS], given[io.IMAGE_EMBEDS])
        return {"inputs_embeds": embed_rows(self.model, *tokens)}


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
    with tracing(config, spec.phase):
        module, fake = _graph_module(config, spec)
        model = export_module(module, fake.mode, spec.contract, _DIMS, spec.dtype)
    _check_attentions(model, spec, type(fake.model).__name__)
    _check_positions(model, type(fake.model).__name__)
    return model, {f"model.{name}": canonical for name, canonical in fake.canonical_names.items()}


def _graph_module(config: PretrainedConfig, spec: GraphSpec) -> tuple[GraphModule, FakeModel]:
    """The module to export. A model that cannot lose rows in its layers keeps them up to the head."""
    module, fake = _make_module(config, spec, keeps_rows=False)
    if spec.phase == "prefill" and spec.boundary == "one-pass":
        try:
            with fake.mode, torch.no_grad():
                module(*example_inputs(fake.mode, spec.contract, _DIMS, spec.dtype))
        except (RuntimeError, ValueError):
            return _make_module(config, spec, keeps_rows=True)
    return module, fake


def _make_module(config: PretrainedConfig, spec: GraphSpec, *, keeps_rows: bool) -> tuple[GraphModule, FakeModel]:
    cache = RecordingCache(spec.plan.num_hidden_layers)
    register_attention(cache)
    fake = build_fake_model(config, spec.dtype, IMPLEMENTATION)
    hold_rotary(fake.model, spec.max_seq_len)
    return GraphModule(spec, fake, cache, keeps_rows=keeps_rows), fake


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
