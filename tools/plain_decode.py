"""The baseline of bench_decode: the decode graph in a session of its own, and nothing of ours around it."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.kv_cache import KVCachePool, SlotRange
from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.tools.bench_message import BenchReply, BenchRequest, serve


def main(argv: Sequence[str] | None = None) -> int:
    """Load the decode graph and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(prog="plain_decode", description="Time the decode graph alone for bench_decode.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args(argv)
    return exit_with_message("plain_decode", lambda: _serve(arguments.engine, arguments.threads))


def _serve(directory: Path, threads: int) -> int:
    manifest = Manifest.load(directory)
    assert manifest.weights is not None
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    folder = str((directory / manifest.weights.directory).resolve())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    graph = (directory / manifest.decode.file).read_bytes()
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    serve(lambda request: measure(session, manifest, request))
    return 0


def measure(session: ort.InferenceSession, manifest: Manifest, request: BenchRequest) -> BenchReply:
    """Time decode steps over caches that hold as many tokens as the prompts have; what they hold does not matter."""
    batch = len(request.prompts)
    lengths = np.array([len(prompt) for prompt in request.prompts])
    num_steps = request.num_settling_steps + request.num_decode_steps
    binding, caches = _bind(session, manifest, batch)
    for cache in caches.values():
        # Written once: pages that were never touched are all one page of zeros, and reading them costs nothing.
        cache[:, :, : lengths.max() + num_steps] = 0.5
    logits = np.empty((batch, 1, manifest.dims.vocab_size), np.float32)
    tokens = np.ones((batch, 1), np.int64)
    step_ms = []
    for _ in range(num_steps):
        start = time.perf_counter()
        inputs = {io.INPUT_IDS: tokens, io.POSITION_IDS: lengths[:, None].copy(), io.CACHE_LEN: lengths}
        for name, value in inputs.items():
            binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        binding.bind_output(io.LOGITS, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        session.run_with_iobinding(binding)
        tokens = np.argmax(logits, axis=-1)
        lengths = lengths + 1
        step_ms.append((time.perf_counter() - start) * 1000)
    del caches
    return BenchReply((), tuple(step_ms[request.num_settling_steps :]), peak_memory_bytes())


def _bind(
    session: ort.InferenceSession, manifest: Manifest, batch: int
) -> tuple[ort.IOBinding, dict[str, NDArray[np.float32]]]:
    binding = session.io_binding()
    contract = manifest.decode.contract
    caches: dict[str, NDArray[np.float32]] = {}
    pool = KVCachePool(manifest.cache, batch, np.dtype(np.float32))
    for declared in contract.inputs:
        if declared.dtype == manifest.cache.dtype:
            # The engine's own kind of memory: its small pages are a trade for size, not the session's doing.
            cache = caches[declared.name] = np.asarray(pool.view(declared.name, SlotRange(0, batch)), np.float32)
            binding.bind_input(declared.name, "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
    for declared in contract.outputs:
        if declared.alias is not None:
            cache = caches[declared.alias]
            binding.bind_output(declared.name, "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
    return binding, caches


if __name__ == "__main__":
    sys.exit(main())
