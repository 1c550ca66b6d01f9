"""The timing cache's file. TensorRT-RTX's caches are empty, but they are read and joined like TensorRT's."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pop_engine.builder.compile.timing_cache import timing_cache
from pop_engine.configs.errors import UsageError
from pop_engine.plugins.tensorrt_messages import Messages


@pytest.fixture
def config(rtx: Any) -> Iterator[Any]:
    messages = Messages(rtx)
    builder = rtx.Builder(messages.logger)
    with warnings.catch_warnings():
        # TensorRT-RTX says that it makes no use of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield builder.create_builder_config()


def test_it_is_written_and_read_again(rtx: Any, config: Any, tmp_path: Path) -> None:
    path = tmp_path / "timing.cache"
    with timing_cache(rtx, config, path):
        assert config.get_timing_cache() is not None
    first = path.read_bytes()
    assert first
    with timing_cache(rtx, config, path):
        pass
    assert path.read_bytes() == first


def test_a_build_that_fails_leaves_it_alone(rtx: Any, config: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), timing_cache(rtx, config, tmp_path / "timing.cache"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_named(rtx: Any, config: Any, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "timing.cache"
    with pytest.raises(UsageError, match=r"--timing-cache .*: cannot be written"), timing_cache(rtx, config, path):
        pass


def test_without_a_file_nothing_is_set(rtx: Any, config: Any) -> None:
    with timing_cache(rtx, config, None):
        assert config.get_timing_cache() is None
