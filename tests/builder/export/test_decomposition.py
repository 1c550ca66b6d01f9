"""Programs become ONNX as they were traced where that is possible, else decomposed: the same numbers either way."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from pop_engine.builder.export.onnx_export import convert


class Conversions(nn.Module):
    """What transformers' classes are full of: conversions to the same dtype, to another one, to the same device."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32).to(torch.float64) * 3
        return torch.nn.functional.silu(wide.to(torch.float32).to("cpu").detach() + x.to(torch.int64))


class Half(nn.Module):
    """Computed in fp32 and rounded after each step, as torch does it for narrow dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        narrow = torch.nn.functional.silu(x.to(torch.float16)) * x.to(torch.float16)
        return (narrow.sqrt() + x).to(torch.float32)


class Rows(nn.Module):
    """Keeps the number of rows, which may be none, at another place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(1, x.shape[0], 2, 2) * 2


class InPlace(nn.Module):
    """Changes a tensor that another name stands for."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        row = y[0]
        row.add_(1)
        return y


class Unknown(nn.Module):
    """An operator that the exporter only knows by its parts."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.special.xlog1py(x, x)
        return result


def export(module: nn.Module) -> ExportedProgram:
    """Traced over rows of four numbers."""
    rows = torch.export.Dim("rows", min=1, max=64)
    return torch.export.export(module.eval(), (torch.rand(3, 4),), dynamic_shapes=({0: rows},), strict=False)


@pytest.fixture
def decompositions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An entry for each program that is decomposed."""
    found: list[str] = []
    decompose = ExportedProgram.run_decompositions

    def watched(program: ExportedProgram, *arguments: Any, **options: Any) -> ExportedProgram:
        found.append("decomposed")
        decomposed: ExportedProgram = decompose(program, *arguments, **options)
        return decomposed

    monkeypatch.setattr(ExportedProgram, "run_decompositions", watched)
    return found


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes that the exporter runs once more."""
    found: list[str] = []
    run_node = Interpreter.run_node

    def watched(interpreter: Interpreter, node: Node) -> Any:
        if node.op == "call_function":
            found.append(node.name)
        return run_node(interpreter, node)

    monkeypatch.setattr(Interpreter, "run_node", watched)
    return found


def test_only_nodes_that_promotion_changes_are_run_again(runs: list[str]) -> None:
    convert(export(Rows()))
    # A number becomes a tensor of x's dtype.
    assert set(runs) == {"scalar_tensor_default", "mul"}
    runs.clear()
    convert(export(Half()))
    assert "add" in runs
    assert not {"to", "to_1", "sqrt"} & set(runs)


@pytest.mark.parametrize(
    ("module", "is_decomposed"),
    [(Conversions(), False), (Half(), False), (Rows(), False), (InPlace(), True), (Unknown(), True)],
)
def test_the_numbers_are_torchs(module: nn.Module, is_decomposed: bool, decompositions: list[str]) -> None:
    torch.manual_seed(0)
    converted = convert(export(module))
    assert bool(decompositions) == is_decomposed
    session = ort.InferenceSession(converted.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for num_rows in (5, 1, 0) if not is_decomposed else (5, 1):
        given = torch.rand(num_rows, 4) * 9
        (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        rtol = 1e-3 if isinstance(module, Half) else 1e-4
        np.testing.assert_allclose(found, module(given).numpy(), rtol, atol=1e-6)
