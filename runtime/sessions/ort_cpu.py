"""ONNX Runtime on the CPU: one session, prepacked, for prefill and decode."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.kv_cache import KVCachePool, SlotRange
from pop_engine.runtime.sessions.image_inputs import ImageBindings
from pop_engine.runtime.sessions.session import ImageRows
from pop_engine.runtime.weights import own_weights

_CACHE_DTYPES = {"fp32": np.dtype(np.float32)}


class _Graph:
    """One graph in an ONNX Runtime session, with a binding per range of slots that was ever used."""

    def __init__(self, session: ort.InferenceSession, record: GraphRecord, pool: KVCachePool) -> None:
        self._session = session
        self._record = record
        self._pool = pool
        self._bindings: dict[SlotRange, Any] = {}

    def run(self, slots: SlotRange, inputs: dict[str, NDArray[np.generic]], logits: NDArray[np.float32] | None) -> None:
        """Run one call. Caches are updated in place, and logits are written where a buffer is given."""
        binding = self._bindings.get(slots)
        if binding is None:
            binding = self._bindings[slots] = self._bind_caches(slots)
        for name, value in inputs.items():
            binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        if logits is not None:
            binding.bind_output(io.LOGITS, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        try:
            self._session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise EngineError(f"{self._record.file}: ONNX Runtime failed ({error})") from error

    def _bind_caches(self, slots: SlotRange) -> Any:
        """Bind every cache tensor of these slots, outputs to their inputs' memory: no copy is ever made."""
        binding = self._session.io_binding()
        for declared in self._record.contract.outputs:
            if declared.alias is not None:
                view = self._pool.view(declared.alias, slots)
                binding.bind_input(declared.alias, "cpu", 0, view.dtype, view.shape, view.ctypes.data)
                binding.bind_output(declared.name, "cpu", 0, view.dtype, view.shape, view.ctypes.data)
        return binding


class OrtCpuSession:
    """The `ort-cpu` target.

    In the one-pass form the prefill graph with one row, a boundary row, is the decode step to the bit, so one
    session does both and its packed weights are the only copy. The two-step form pays for a second session.
    """

    def __init__(self, directory: Path, weights: Path, manifest: Manifest, threads: int | None) -> None:
        if manifest.cache.dtype not in _CACHE_DTYPES:
            expected = ", ".join(_CACHE_DTYPES)
            raise EngineError(f"{directory}: dtype {manifest.cache.dtype}: ort-cpu runs {expected}; build it for that")
        self._dims = manifest.dims
        self._one_pass = manifest.boundary == "one-pass"
        self._has_context_rows = self._one_pass and manifest.plan.num_tail_layers > 0
        self._images = ImageBindings.of(manifest.prefill.contract)
        pool = KVCachePool(manifest.cache, manifest.limits.max_batch_size, _CACHE_DTYPES[manifest.cache.dtype])
        own = own_weights(directory, weights, manifest)
        self._prefill = _Graph(_load(directory / manifest.prefill.file, weights, own, threads), manifest.prefill, pool)
        self._decode = self._prefill
        if manifest.target.decode_with == "decode":
            self._decode = _Graph(_load(directory / manifest.decode.file, weights, {}, threads), manifest.decode, pool)

    def prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        cache_len: int,
        num_boundary: int,
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """See Session."""
        inputs = self._token_inputs(token_ids[None], np.array([cache_len]), images)
        logits = self._add_rows(inputs, num_boundary) if self._one_pass else None
        self._prefill.run(SlotRange(slot, 1), inputs, logits)
        return np.empty((0, self._dims.vocab_size), np.float32) if logits is None else logits[0]

    def decode(
        self,
        slots: SlotRange,
        token_ids: NDArray[np.int64],
        cache_lens: NDArray[np.int64],
        images: ImageRows | None = None,
    ) -> NDArray[np.float32]:
        """See Session."""
        inputs = self._token_inputs(token_ids, cache_lens, images)
        if self._decode is self._prefill:
            logits = self._add_rows(inputs, token_ids.shape[1])
        else:
            logits = np.empty((*token_ids.shape, self._dims.vocab_size), np.float32)
        self._decode.run(slots, inputs, logits)
        return logits

    def close(self) -> None:
        """See Session."""
        del self._prefill, self._decode

    def _token_inputs(
        self, token_ids: NDArray[np.int64], cache_lens: NDArray[np.int64], images: ImageRows | None
    ) -> dict[str, NDArray[np.generic]]:
        inputs: dict[str, NDArray[np.generic]] = {
            io.INPUT_IDS: np.ascontiguousarray(token_ids),
            io.POSITION_IDS: cache_lens[:, None] + np.arange(token_ids.shape[1]),
            io.CACHE_LEN: np.ascontiguousarray(cache_lens),
        }
        if self._images is not None:
            self._images.add(inputs, images)
        return inputs

    def _add_rows(self, inputs: dict[str, NDArray[np.generic]], num_boundary: int) -> NDArray[np.float32]:
        """Say which rows are the boundary, and make room for their logits."""
        batch, rows = inputs[io.INPUT_IDS].shape
        if self._has_context_rows:
            inputs[io.CONTEXT_ROWS] = np.arange(rows - num_boundary)
        inputs[io.BOUNDARY_ROWS] = np.arange(rows - num_boundary, rows)
        return np.empty((batch, num_boundary, self._dims.vocab_size), np.float32)


def _load(
    graph: Path, weights: Path, own_weights: Mapping[str, NDArray[np.generic]], threads: int | None
) -> ort.InferenceSession:
    """Load a graph. Its weights lie in one folder, but for those given."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.log_severity_level = 4
    # The graph names its weights by file; this is the folder that the files are in.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights.resolve()))
    values = [ort.OrtValue.ortvalue_from_numpy(tensor) for tensor in own_weights.values()]
    if values:
        options.add_external_initializers([*own_weights], values)
    try:
        return ort.InferenceSession(graph.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(f"{graph}: ONNX Runtime {ort.__version__} cannot load it ({error})") from error
