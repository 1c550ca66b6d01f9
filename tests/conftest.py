"""Engines and models that many tests share, built once per session."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_kit import EngineKit, TinyEngines, load_hf_model, save_tiny_checkpoint


@pytest.fixture(scope="session")
def build_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineKit]:
    kit = EngineKit(tmp_path_factory.mktemp("engines"))
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_engines(build_engine: EngineKit, tiny_checkpoint: Path) -> TinyEngines:
    return TinyEngines(build_engine, tiny_checkpoint)


@pytest.fixture(scope="session")
def tiny_model(tiny_checkpoint: Path) -> Any:
    return load_hf_model(tiny_checkpoint)
