"""Programs become ONNX as they were traced where that is possible, else decomposed: the same numbers either way."""

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from pop_engine.builder.export.onnx_export import convert


class Conversions(nn.Module):
    """What transformers' classes are full of: conversions to the same dtype, to another one, to the same device."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32).to(torch.float64) * 3
        return torch.nn.functional.silu(wide.to(torch.float32).to("cpu").detach() + x.to(torch.int64))


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


@pytest.mark.parametrize(
    ("module", "is_decomposed"), [(Conversions(), False), (Rows(), False), (InPlace(), True), (Unknown(), True)]
)
def test_the_numbers_are_torchs(module: nn.Module, is_decomposed: bool, decompositions: list[str]) -> None:
    torch.manual_seed(0)
    example = torch.rand(3, 4)
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(module.eval(), (example,), dynamic_shapes=({0: rows},), strict=False)
    converted = convert(program)
    assert bool(decompositions) == is_decomposed
    session = ort.InferenceSession(converted.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for num_rows in (5, 1, 0) if not is_decomposed else (5, 1):
        given = torch.rand(num_rows, 4) * 9
        (found,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        np.testing.assert_allclose(found, module(given).numpy(), rtol=1e-4, atol=1e-6)
