"""Trace the vision graph: one image's pixels to the features of its tokens."""

from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from pop_engine.builder.export.failure import tracing
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.builder.export.families.vision_family import VisionFamily
from pop_engine.builder.export.full_attention import IMPLEMENTATION, register_full_attention
from pop_engine.builder.export.model import build_fake_model
from pop_engine.builder.export.onnx_export import DynamicDim, export_module
from pop_engine.configs import io_contract as io
from pop_engine.configs.manifest import DType

_NUM_EXAMPLE_TOKENS = 6


@dataclass(frozen=True)
class VisionSpec:
    """The vision graph to trace. `patches_per_token` is 1 where its inputs are not patches."""

    contract: io.GraphContract
    dtype: DType
    patches_per_token: int
    phase: io.GraphName = "vision"


class VisionModule(nn.Module):
    """The vision tower between the bindings of its contract."""

    def __init__(self, family: VisionFamily, model: PreTrainedModel, contract: io.GraphContract) -> None:
        super().__init__()
        self.model = model
        self._family = family
        self._contract = contract

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors in the order of the contract's inputs; returns the contract's outputs."""
        given = dict(zip((binding.name for binding in self._contract.inputs), tensors, strict=True))
        features = self._family.encode(self.model, given)
        return tuple(features[binding.name] for binding in self._contract.outputs)


def trace_vision(config: PretrainedConfig, spec: VisionSpec) -> tuple[ir.Model, dict[str, str]]:
    """Trace the vision graph as `trace_graph` traces the others; raises EngineError where that is not possible."""
    family = vision_family(config)
    assert family is not None
    register_full_attention()
    num_patches = _NUM_EXAMPLE_TOKENS * spec.patches_per_token
    dims = {
        io.NUM_IMAGE_TOKENS: DynamicDim(_NUM_EXAMPLE_TOKENS),
        io.NUM_PATCHES: DynamicDim(num_patches, io.NUM_IMAGE_TOKENS, spec.patches_per_token),
    }
    with tracing(config, "vision"):
        fake = build_fake_model(config, spec.dtype, IMPLEMENTATION)
        module = VisionModule(family, fake.model, spec.contract)
        model = export_module(module, fake.mode, spec.contract, dims, spec.dtype)
    return model, {f"model.{name}": canonical for name, canonical in fake.canonical_names.items()}
