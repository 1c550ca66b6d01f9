"""TensorRT's runtime on a simulated GPU: a "plan" names an ONNX graph, which ONNX Runtime runs on the bound memory.

Engines are built in fp32 for it, with the builder's own lowering, contracts and profiles: only compiling is left out.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from pop_engine.builder.compile import tensorrt as tensorrt_target
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt import TensorRT
from pop_engine.builder.compile.tensorrt_profiles import profiles
from pop_engine.configs import build_config
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.plan_record import PlanRecord
from simulated_gpu import ALIGNMENT, SimulatedGpu

VERSION = "0.0.1"
ACTIVATION_BYTES = 4096
_DTYPES = {"fp32": np.float32, "int64": np.int64}


@contextmanager
def simulated_compiler() -> Iterator[None]:
    """Within it, engines for TensorRT are built in fp32 too, with the graph's name for a plan."""
    supported = {**build_config.SUPPORTED_TARGETS, "tensorrt-rtx": ("fp32",)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_config, "SUPPORTED_TARGETS", supported)
        patch.setattr(tensorrt_target, "load_module", lambda name: SimpleNamespace(__version__=VERSION))
        patch.setattr(TensorRT, "compile", lambda self, model, job: _record(model, job))
        yield


def _record(model: ir.Model, job: PlanJob) -> PlanRecord:
    job.out.write_bytes(job.out.stem.encode())
    return PlanRecord(
        file=job.out.name,
        gpu="sm89",
        num_bytes=job.out.stat().st_size,
        contract=job.contract,
        profiles=profiles(job),
        attentions=(),
        constants=(),
        num_layers=len(model.graph),
        weight_streaming=False,
        version_compatible=False,
        compile_seconds=0.0,
    )


class SimulatedTensorRT:
    """Stands for the module. `rtx` says whether it has what only TensorRT-RTX has."""

    __version__ = VERSION
    ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user-managed")

    class ILogger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

        def __init__(self) -> None:
            pass

    def __init__(self, gpu: SimulatedGpu, directory: Path, records: tuple[PlanRecord, ...], *, rtx: bool) -> None:
        self.may_load = True
        self.executed: list[dict[str, tuple[int, ...]]] = []
        self._gpu = gpu
        self._directory = directory
        self._records = {Path(record.file).stem: record for record in records}
        if rtx:
            self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", LAZY="lazy")

    def Runtime(self, logger: object) -> Any:  # noqa: N802
        return SimpleNamespace(deserialize_cuda_engine=self._deserialize)

    def _deserialize(self, plan: Any) -> "_Engine":
        assert self.may_load, "a plan is touched where the engine should have been refused"
        stem = bytes(plan).decode()
        options = ort.SessionOptions()
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._directory / "weights")
        )
        graph = (self._directory / f"{stem}.onnx").read_bytes()
        session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        return _Engine(self._gpu, session, self._records[stem], self.executed)


class _Engine:
    device_memory_size_v2 = ACTIVATION_BYTES

    def __init__(self, gpu: SimulatedGpu, session: ort.InferenceSession, record: PlanRecord, executed: Any) -> None:
        self._made = (gpu, session, record, executed)
        contract = record.contract
        self._names = [b.name for b in (*contract.inputs, *contract.weights, *contract.outputs)]
        self._aliases = {b.name: b.alias for b in contract.outputs}
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, idx: int) -> str:
        return self._names[idx]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._aliases[name]

    def create_runtime_config(self) -> Any:
        return SimpleNamespace(
            set_execution_context_allocation_strategy=lambda strategy: None,
            create_runtime_cache=object,
            set_runtime_cache=lambda cache: None,
        )

    def create_execution_context(self, how: object) -> "_Context":
        return _Context(*self._made)


class _Context:
    """Like TensorRT's, it keeps shapes and addresses, and takes what they are when work is enqueued."""

    def __init__(self, gpu: SimulatedGpu, session: ort.InferenceSession, record: PlanRecord, executed: Any) -> None:
        self._gpu = gpu
        self._session = session
        self._record = record
        self._executed = executed
        self._profile = record.profiles[0]
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._activations = 0

    def set_device_memory(self, address: int, num_bytes: int) -> None:
        assert address % ALIGNMENT == 0
        assert num_bytes >= ACTIVATION_BYTES
        self._activations = address

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = self._record.profiles[profile]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        contract = self._record.contract
        binding = next(b for b in (*contract.inputs, *contract.weights) if b.name == name)
        self._shapes[name] = shape
        return all(self._takes(dim, size) for dim, size in zip(binding.shape, shape, strict=True))

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return address % ALIGNMENT == 0

    def is_stream_capturable(self, stream: int) -> bool:
        return True

    def execute_async_v3(self, stream: int) -> bool:
        shapes, addresses, activations = dict(self._shapes), dict(self._addresses), self._activations
        self._gpu.put(lambda: self._run(shapes, addresses, activations))
        return True

    def _takes(self, dim: int | str, size: int) -> bool:
        least, _, most = self._profile.dims[dim] if isinstance(dim, str) else (dim, dim, dim)
        return least <= size <= most

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int], activations: int) -> None:
        # Whatever else lies there would be lost on a GPU too.
        self._gpu.write(activations, b"\xaa" * ACTIVATION_BYTES)
        contract = self._record.contract
        inputs = {b.name: self._read(b, shapes, addresses) for b in (*contract.inputs, *contract.weights)}
        names = [b.name for b in contract.outputs]
        found = dict(zip(names, self._session.run(names, inputs), strict=True))
        for binding in contract.outputs:
            if binding.alias is not None:
                assert addresses[binding.name] == addresses[binding.alias], "TensorRT writes the cache in place"
            self._gpu.write(addresses[binding.name], np.ascontiguousarray(found[binding.name]).tobytes())
        self._executed.append({b.name: shapes[b.name] for b in contract.inputs if b.dtype == "int64"})

    def _read(self, binding: Binding, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> Any:
        shape, dtype = shapes[binding.name], _DTYPES[binding.dtype]
        raw = self._gpu.read(addresses[binding.name], prod(shape) * np.dtype(dtype).itemsize)
        return np.frombuffer(raw, dtype).reshape(shape)


def cached_rows(gpu: SimulatedGpu, address: int, shape: tuple[int, ...]) -> Any:
    """A slot's part of one cache tensor, fp32."""
    return np.frombuffer(gpu.read(address, prod(shape) * ctypes.sizeof(ctypes.c_float)), np.float32).reshape(shape)
