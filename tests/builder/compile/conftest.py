"""Lowered graphs, and TensorRT-RTX where it is installed."""

from typing import Any

import pytest

from tensorrt_kit import LoweredGraphs


@pytest.fixture(scope="session")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredGraphs:
    return LoweredGraphs(tmp_path_factory.mktemp("lowered"))


@pytest.fixture(scope="session")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs `pip install tensorrt-rtx-cu13`: 95 MB, and no GPU")
