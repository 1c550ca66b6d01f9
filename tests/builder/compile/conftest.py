"""Lowered graphs, and TensorRT-RTX where it is installed."""

import os
from typing import Any

import pytest

from tensorrt_kit import LoweredGraphs


@pytest.fixture(scope="session")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> LoweredGraphs:
    # The folder that pytest-xdist's processes share, where there are any.
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "lowered"
    folder.mkdir(exist_ok=True)
    return LoweredGraphs(folder)


@pytest.fixture(scope="session")
def rtx() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="needs `pip install tensorrt-rtx-cu13`: 95 MB, and no GPU")
