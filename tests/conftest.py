"""Engines and models that many tests share, built once per session."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_kit import EngineKit, TinyModels


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineKit]:
    kit = EngineKit(tmp_path_factory.mktemp("engines"))
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def tiny(build_engine: EngineKit, tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(build_engine, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny: TinyModels) -> Path:
    return tiny.checkpoint()
