"""Engines for ONNX Runtime on CUDA: built here, and every node's kernel looked for, by table or in a session."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

from engine_kit import EngineKit, TinyModels
from pop_engine.builder.compile.ort_cuda_kernels import KERNELS_OF, OPSET
from pop_engine.builder.compile.ort_cuda_operators import RefuseOperators
from pop_engine.builder.compile.ort_cuda_partition import (
    check_partition,
    fallen_back,
    possible_check,
    provider_version,
    table_faults,
)
from pop_engine.configs.build_config import BuildOptions, resolve_build
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.model_dims import ModelDims

DIMS = ModelDims("llama", 3, 128, 192, 4, 2, 64, 320, 128)


def build(build_engine: EngineKit, tiny: TinyModels, dtype: str) -> Path:
    return build_engine.directory(tiny.checkpoint(), target="ort-cuda", dtype=dtype, tail_layers=2, max_seq_len=64)


def model_of(op_type: str, dtype: ir.DataType, domain: str = "", opset: int = OPSET) -> ir.Model:
    """One node from an input to an output of a dtype."""
    value = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["rows", 2]))
    node = ir.node(op_type, [value], domain=domain)
    node.outputs[0].dtype = dtype
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": opset})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
def test_an_engine_is_built_and_says_how_it_was_checked(build_engine: EngineKit, tiny: TinyModels, dtype: str) -> None:
    directory = build(build_engine, tiny, dtype)
    manifest = Manifest.load(directory)

    assert (manifest.target.name, manifest.dtype, manifest.target.decode_with) == ("ort-cuda", dtype, "decode")
    assert manifest.target.partition_check == "kernel-table"
    assert manifest.target.versions["onnxruntime-gpu"] == KERNELS_OF
    for record in (manifest.prefill, manifest.decode):
        model = ir.load(directory / record.file)
        assert list(table_faults(model)) == []
        names = [value.name for value in model.graph.inputs]
        contract = record.contract
        assert names == [binding.name for binding in (*contract.inputs, *contract.weights)]
        assert sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value) < 1024
        attentions = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
        assert len(attentions) == manifest.dims.num_hidden_layers
        # The 17th input, query_seqlens, is newer than the last release for CUDA.
        assert max(len(node.inputs) for node in attentions) == 7


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (model_of("Reciprocal", ir.DataType.BFLOAT16), "no CUDA kernel for Reciprocal in bf16"),
        (model_of("Abacus", ir.DataType.FLOAT), "no CUDA kernel for Abacus in fp32"),
        (model_of("GroupQueryAttention", ir.DataType.FLOAT, "com.microsoft"), "GroupQueryAttention in fp32"),
        (model_of("Attention", ir.DataType.DOUBLE), "no CUDA kernel for Attention in fp64"),
        (model_of("Add", ir.DataType.FLOAT, opset=26), "opset 26 is not the 24 of the table"),
    ],
)
def test_a_node_without_a_kernel_fails_the_build(model: ir.Model, message: str) -> None:
    with pytest.raises(EngineError, match=f"prefill.onnx: .*{message}.*; it would run on the CPU: build for ort-cpu"):
        check_partition(model, Path("prefill.onnx"), "kernel-table")


@pytest.mark.parametrize("model", [model_of("Reciprocal", ir.DataType.FLOAT16), model_of("Mod", ir.DataType.INT64)])
def test_a_node_with_a_kernel_and_integers_pass(model: ir.Model) -> None:
    assert list(table_faults(model)) == []


def test_a_session_s_partition_is_read_in_a_process(tmp_path: Path) -> None:
    """There is no GPU here, so the CPU's provider is asked: every floating-point node has then fallen back to it."""
    path = tmp_path / "prefill.onnx"
    model = model_of("Abs", ir.DataType.FLOAT)
    size = ir.node("Shape", [model.graph.inputs[0]])
    size.outputs[0].dtype = ir.DataType.INT64
    size.outputs[0].name = "size"
    for name, node in zip(("absolute", "size"), (model.graph[0], size), strict=True):
        node.name = name
    model.graph.append(size)
    model.graph.outputs.append(size.outputs[0])
    ir.save(model, path)
    command = [sys.executable, "-m", "pop_engine.runtime.partition", str(path), "--provider", "CPUExecutionProvider"]
    assigned = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)

    assert sorted(name for _, name, _ in assigned) == ["absolute", "size"]
    (fault,) = fallen_back(model, assigned)
    assert fault == "ONNX Runtime puts Abs (absolute) on CPUExecutionProvider"
    assert not list(fallen_back(model, [("CUDAExecutionProvider", name, op) for _, name, op in assigned]))
    with pytest.raises(EngineError, match="prefill.onnx: its partition cannot be looked at .*CUDAExecutionProvider"):
        check_partition(model, path, "session")


def test_a_session_is_asked_where_there_is_a_gpu_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.31.9")
    assert possible_check(has_gpu=True) == "session"
    assert provider_version("session") == "1.31.9"
    assert possible_check(has_gpu=False) == "kernel-table"
    assert provider_version("kernel-table") == KERNELS_OF


def test_what_has_no_lowering_is_named() -> None:
    model = model_of("Experts", ir.DataType.FLOAT, "pop")
    with pytest.raises(EngineError, match="target ort-cuda: does not take Experts yet; build for ort-cpu"):
        RefuseOperators()(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(target="ort-cuda", dtype="fp32"), "--dtype fp32: target ort-cuda runs bf16, fp16"),
        (BuildOptions(target="ort-cuda", gpu="sm89"), "--gpu sm89: only target tensorrt-rtx"),
    ],
)
def test_what_it_does_not_take(options: BuildOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_build(options, DIMS)
