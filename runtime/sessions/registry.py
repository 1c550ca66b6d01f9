"""The session of each target, imported only when an engine asks for it: each needs packages that others do not."""

from pathlib import Path

from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.memory_estimate import check_host_memory
from pop_engine.runtime.sessions.session import Session


def open_session(directory: Path, weights: Path, manifest: Manifest, threads: int | None) -> Session:
    """Load an engine's graphs, weights and cache. `weights` is the folder of the weight files.

    Raises EngineError where the machine is not one that the engine was built for.
    """
    target = manifest.target.name
    if target == "ort-cpu":
        from pop_engine.runtime.sessions.ort_cpu import OrtCpuSession

        check_host_memory(manifest)
        return OrtCpuSession(directory, weights, manifest, threads)
    if target == "ort-cuda":
        from pop_engine.runtime.sessions.ort_cuda import OrtCudaSession

        return OrtCudaSession(directory, manifest)
    from pop_engine.runtime.sessions.tensorrt import TensorRTSession

    return TensorRTSession(directory, manifest)
