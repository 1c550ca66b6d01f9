"""ONNX Runtime on an NVIDIA GPU: both graphs over one copy of the weights and one cache, all bound by address."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.manifest import Limits, Manifest
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.memory_estimate import device_estimate
from pop_engine.runtime.sessions.device import open_device
from pop_engine.runtime.sessions.device_call import Inputs, dims_of, logits_binding, shape_of
from pop_engine.runtime.sessions.device_session import DeviceSession
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.device_tensors import CallSpace, DeviceTensors

PROVIDER, DEVICE_TYPE = "CUDAExecutionProvider", "cuda"
# New tokens that a decode call takes at once: of one sequence, for CUDA's attention takes no more of several.
MAX_FEW_TOKENS = 8
_ONNX_TYPES = {"fp32": 1, "int64": 7, "fp16": 10, "bf16": 16}
_INSTALL = "pip uninstall -y onnxruntime; pip install --force-reinstall 'onnxruntime-gpu>=1.31,<2'"


def require_provider() -> None:
    """Raise EngineError where ONNX Runtime is the CPU's: both packages fill one folder, and the last one wins."""
    if PROVIDER not in ort.get_available_providers():
        raise EngineError(f"target ort-cuda: the onnxruntime {ort.__version__} here has no {PROVIDER}; `{_INSTALL}`")


def load_graph(graph: Path, stream: DeviceStream) -> ort.InferenceSession:
    """A graph on the GPU, its work on our stream. Raises EngineError where it, or the GPU, cannot be had."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    on_gpu = (PROVIDER, {"device_id": "0", "user_compute_stream": str(stream.handle)})
    try:
        session = ort.InferenceSession(graph, options, providers=[on_gpu, "CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it ({error})") from error
    if PROVIDER not in session.get_providers():
        raise EngineError(f"{graph}: ONNX Runtime {ort.__version__} fell back to the CPU; check its CUDA libraries")
    return session


class _Graph:
    """One graph, with a binding per range of slots that was ever used: caches and weights stay bound."""

    def __init__(self, session: ort.InferenceSession, record: GraphRecord, tensors: DeviceTensors) -> None:
        self._session = session
        self._record = record
        self._tensors = tensors
        self._bindings: dict[SlotRange, Any] = {}

    def run(self, slots: SlotRange, inputs: Inputs) -> tuple[int, ...]:
        """Run one call, whose inputs have been uploaded; returns the shape of its logits."""
        contract = self._record.contract
        dims = dims_of(contract, inputs)
        binding = self._bindings.get(slots)
        if binding is None:
            binding = self._bindings[slots] = self._bind_fixed(slots, dims)
        for declared in contract.inputs:
            if declared.name in inputs:
                self._bind(binding.bind_input, declared, slots, dims)
        logits = logits_binding(contract)
        if logits is not None:
            self._bind(binding.bind_output, logits, slots, dims)
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise EngineError(f"{self._record.file}: ONNX Runtime failed ({error})") from error
        return (0, 0, 0) if logits is None else shape_of(logits, dims)

    def _bind_fixed(self, slots: SlotRange, dims: dict[str, int]) -> Any:
        """Bind weights, and every cache tensor of these slots: outputs to their inputs' memory."""
        binding = self._session.io_binding()
        contract = self._record.contract
        by_name = {declared.name: declared for declared in contract.inputs}
        for declared in contract.weights:
            self._bind(binding.bind_input, declared, slots, dims)
        for declared in contract.outputs:
            if declared.alias is not None:
                self._bind(binding.bind_input, by_name[declared.alias], slots, dims)
                self._bind(binding.bind_output, declared, slots, dims)
        return binding

    def _bind(self, bind: Any, declared: Binding, slots: SlotRange, dims: dict[str, int]) -> None:
        address = self._tensors.address(declared, slots)
        bind(declared.name, DEVICE_TYPE, 0, _ONNX_TYPES[declared.dtype], shape_of(declared, dims), address)


class OrtCudaSession(DeviceSession):
    """The target `ort-cuda`. Weights are inputs of both graphs, so two sessions share one copy of them.

    Raises EngineError where ONNX Runtime, the driver or the free memory are not what the engine needs.
    """

    def _open(self, directory: Path, manifest: Manifest, opened: ExitStack) -> None:
        require_provider()
        self._device = opened.enter_context(open_device(f"{directory}: target ort-cuda"))
        records = (manifest.prefill, manifest.decode)
        spaces = [
            CallSpace(record.contract, largest)
            for record, largest in zip(records, _largest(manifest.limits), strict=True)
        ]
        estimate = device_estimate(manifest, num_rows=max(space.num_rows for space in spaces))
        estimate.check(self._device.free_bytes(), f"{directory}: GPU 0 ({self._device.name})")
        self._vocab_size, self._dtype = manifest.dims.vocab_size, manifest.cache.dtype
        self._stream = opened.enter_context(DeviceStream(self._device))
        self._tensors = DeviceTensors(self._device, self._stream, directory, manifest, spaces)
        opened.callback(self._tensors.close)
        opened.callback(self._drop)
        self._prefill, self._decode = (
            _Graph(load_graph(directory / record.file, self._stream), record, self._tensors) for record in records
        )
        self._prefill_contract, self._decode_contract = (record.contract for record in records)

    def _max_rows(self, slots: SlotRange) -> int:
        return MAX_FEW_TOKENS if slots.count == 1 else 1

    def _run_prefill(self, slots: SlotRange, inputs: Inputs, *, wants_logits: bool) -> NDArray[np.float32] | None:
        return self._run(self._prefill, slots, inputs, wants_logits=wants_logits)

    def _run_decode(self, slots: SlotRange, inputs: Inputs) -> NDArray[np.float32]:
        logits = self._run(self._decode, slots, inputs, wants_logits=True)
        assert logits is not None
        return logits

    def _run(
        self, graph: _Graph, slots: SlotRange, inputs: Inputs, *, wants_logits: bool
    ) -> NDArray[np.float32] | None:
        buffers = self._tensors.buffers
        buffers.write(inputs)
        buffers.upload()
        shape = graph.run(slots, inputs)
        if wants_logits:
            buffers.download(shape, self._dtype)
        self._stream.wait()
        return buffers.logits(shape, self._dtype) if wants_logits else None

    def _drop(self) -> None:
        """Sessions go before what they are bound to, and before the GPU's context."""
        self._prefill = self._decode = None  # type: ignore[assignment]


def _largest(limits: Limits) -> tuple[dict[str, int], dict[str, int]]:
    """The largest calls of the prefill graph and of the decode graph."""
    chunk = limits.max_prefill_len
    few = min(MAX_FEW_TOKENS, limits.max_seq_len)
    return (
        {io.BATCH: 1, io.SEQ: chunk, io.NUM_CONTEXT: chunk},
        {io.BATCH: limits.max_batch_size, io.SEQ: few},
    )
