"""Does the whole decoder run on the GPU? A node that falls back to the CPU costs two copies in every call."""

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from pop_engine.builder.compile.ort_cuda_kernels import KERNELS, KERNELS_OF, OPSET
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import PartitionCheck

_PROVIDER = "CUDAExecutionProvider"
_FLOATS = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
}
# Folded before nodes are placed, and reading no more of a tensor than its sizes.
_NO_WORK = frozenset({"Constant", "Shape", "Size"})


def possible_check(*, has_gpu: bool) -> PartitionCheck:
    """How a graph can be checked here: by the session itself, or, where that needs what is missing, by the table."""
    return "session" if has_gpu and _installed_version() is not None else "kernel-table"


def provider_version(check: PartitionCheck) -> str:
    """The onnxruntime-gpu that a check speaks of."""
    return (_installed_version() if check == "session" else None) or KERNELS_OF


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("onnxruntime-gpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_partition(model: ir.Model, graph: Path, check: PartitionCheck) -> None:
    """Raise EngineError where floating-point work of a graph would run on the CPU; `graph` is its file.

    Integers may: ONNX Runtime puts the arithmetic of shapes and lengths there on purpose.
    """
    faults = _session_faults(model, graph) if check == "session" else table_faults(model)
    for fault in faults:
        raise EngineError(f"{graph.name}: {fault}; it would run on the CPU: build for ort-cpu, or with another --dtype")


def table_faults(model: ir.Model) -> Iterator[str]:
    """Nodes that no kernel of the table takes."""
    opset = model.opset_imports.get("", OPSET)
    if opset != OPSET:
        yield f"opset {opset} is not the {OPSET} of the table of CUDA kernels"
    for node in model.graph.all_nodes():
        dtypes = _float_dtypes(node)
        if not dtypes:
            continue
        name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        if not any(dtypes <= kernel for kernel in KERNELS.get(name, ())):
            yield f"onnxruntime-gpu {KERNELS_OF} has no CUDA kernel for {name} in {' and '.join(sorted(dtypes))}"


def _session_faults(model: ir.Model, graph: Path) -> Iterator[str]:
    """Nodes that a session puts on the CPU, in a process of its own: a builder does not load the runtime."""
    command = [sys.executable, "-m", "pop_engine.runtime.partition", str(graph)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise EngineError(f"{graph.name}: its partition cannot be looked at ({finished.stderr.strip()})")
    return fallen_back(model, json.loads(finished.stdout))


def fallen_back(model: ir.Model, assigned: Iterable[Sequence[str]]) -> Iterator[str]:
    """Of (provider, node, operator), those that are not on the GPU and work on floating-point numbers.

    A node that is not the graph's is one that ONNX Runtime has fused, which it does for floating point alone.
    """
    integers = {node.name for node in model.graph.all_nodes() if not _float_dtypes(node)}
    for provider, name, op_type in assigned:
        if provider != _PROVIDER and name not in integers:
            yield f"ONNX Runtime puts {op_type} ({name}) on {provider}"


def _float_dtypes(node: ir.Node) -> frozenset[str]:
    """Floating-point dtypes that a node works on."""
    if node.op_type in _NO_WORK:
        return frozenset()
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    return frozenset(_FLOATS[value.dtype] for value in values if value.dtype in _FLOATS)
