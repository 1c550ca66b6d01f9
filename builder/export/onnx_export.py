"""From a module that takes one graph's inputs to an ONNX model with the contract's names."""

import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from unittest.mock import patch

import onnx_ir as ir
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from pop_engine.builder.export.decomposition import (
    is_functional,
    simplify_conversions,
    without_decompositions,
    without_running,
)
from pop_engine.builder.export.model import TORCH_DTYPES
from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.manifest import DType

OPSET_VERSION = 24
_MAX_SIZE = 1 << 20
_DTYPES = {"int64": torch.int64, "fp32": torch.float32}


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that differs from call to call: `multiple` of the one named `of`, where that is given.

    `example` is a size to trace with. Any do, if they differ and are neither 0 nor 1, which torch.export would take
    for constants.
    """

    example: int
    of: str | None = None
    multiple: int = 1


Dims = Mapping[str, DynamicDim]


def example_inputs(mode: FakeTensorMode, contract: GraphContract, dims: Dims, dtype: DType) -> tuple[torch.Tensor, ...]:
    """Fake inputs of the contract's shapes."""
    with mode:
        return tuple(
            torch.zeros(
                [dim if isinstance(dim, int) else dims[dim].example for dim in binding.shape],
                dtype=_DTYPES.get(binding.dtype, TORCH_DTYPES[dtype]),
            )
            for binding in contract.inputs
        )


def export_module(
    module: nn.Module, mode: FakeTensorMode, contract: GraphContract, dims: Dims, dtype: DType
) -> ir.Model:
    """Trace a module. Its inputs, outputs and dynamic dimensions get the contract's names."""
    inputs = example_inputs(mode, contract, dims, dtype)
    # Where each node was traced from is nothing that a graph keeps.
    with warnings.catch_warnings(), torch.no_grad(), patch.object(torch.fx.config, "do_not_emit_stack_traces", True):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
        program = torch.export.export(module, inputs, dynamic_shapes=(_dynamic_shapes(contract, dims),), strict=False)
        # The tail's discarded attention and FFN go before the slow decompositions, not after.
        program.graph_module.graph.eliminate_dead_code()
        exported = convert(program)
    _name_bindings(exported.model, contract)
    return exported.model


def convert(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
    """Translate the operators as they were traced; where the exporter does not know them all, what they are made of."""
    simplify_conversions(program.graph)
    if is_functional(program.graph):
        with suppress(torch.onnx.OnnxExporterError), without_decompositions(program), without_running(program.graph):
            return _translate(program)
    return _translate(program)


def _translate(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
    exported = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=OPSET_VERSION, verbose=False)
    assert exported is not None
    return exported


def _dynamic_shapes(contract: GraphContract, dims: Dims) -> tuple[dict[int, torch.export.Dim], ...]:
    made = {name: torch.export.Dim(name, min=1, max=_MAX_SIZE) for name, dim in dims.items() if dim.of is None}
    made |= {name: dim.multiple * made[dim.of] for name, dim in dims.items() if dim.of is not None}
    return tuple(
        {axis: made[dim] for axis, dim in enumerate(binding.shape) if isinstance(dim, str)}
        for binding in contract.inputs
    )


def _name_bindings(model: ir.Model, contract: GraphContract) -> None:
    """Give inputs and outputs the contract's names, and their dynamic dimensions too."""
    renamed: dict[str, str] = {}
    declared = ((model.graph.inputs, contract.inputs), (model.graph.outputs, contract.outputs))
    for value, binding in (pair for values, bindings in declared for pair in zip(values, bindings, strict=True)):
        value.name = binding.name
        assert value.shape is not None
        for traced, dim in zip(value.shape, binding.shape, strict=True):
            if isinstance(traced, ir.SymbolicDim) and isinstance(dim, str):
                renamed.setdefault(str(traced.value), dim)
    for value in _all_values(model.graph):
        if value.shape is not None and any(isinstance(dim, ir.SymbolicDim) for dim in value.shape):
            value.shape = ir.Shape(
                [renamed.get(str(d.value), d.value) if isinstance(d, ir.SymbolicDim) else d for d in value.shape]
            )


def _all_values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(output for node in graph for output in node.outputs)]
