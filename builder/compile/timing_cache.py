"""TensorRT's timing cache: what it measured in one build saves the next one time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pop_engine.configs.errors import EngineError, UsageError, describe_os_error
from pop_engine.plugins.tensorrt_messages import Module


@contextmanager
def timing_cache(trt: Module, config: Any, path: Path | None) -> Iterator[None]:
    """Compile with what the file knows, and add to it what was measured. No file: a cache for this build alone.

    Both graphs compile at once, so the file is locked and read again before it is written. Raises UsageError where
    it cannot be read or written, EngineError where it is of another TensorRT or GPU.
    """
    if path is None:
        yield
        return
    cache = _create(config, path, _read(path))
    if not config.set_timing_cache(cache, ignore_mismatch=False):
        raise EngineError(f"--timing-cache {path}: of another GPU or TensorRT {trt.__version__}; name another file")
    yield
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            cache.combine(_create(config, path, file.read()), ignore_mismatch=False)
            file.truncate(0)
            file.write(memoryview(cache.serialize()))
    except OSError as error:
        raise UsageError(f"--timing-cache {path}: cannot be written ({describe_os_error(error)})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UsageError(f"--timing-cache {path}: cannot be read ({describe_os_error(error)})") from error


def _create(config: Any, path: Path, content: bytes) -> Any:
    cache = config.create_timing_cache(content)
    if cache is None:
        raise EngineError(f"--timing-cache {path}: TensorRT cannot make a timing cache of it; name another file")
    return cache
