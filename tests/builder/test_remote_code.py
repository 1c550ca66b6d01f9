"""Code that a checkpoint brings runs with leave, and only then."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pop_engine.builder.pipeline import build
from pop_engine.builder.progress import BuildProgress
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.errors import UsageError

CONFIG_CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({witness!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODEL_CODE = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama under a model type that transformers does not know. Its code leaves a witness that it ran."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, num_attention_heads=2)).save_pretrained(folder)
    (folder / "configuration_own.py").write_text(CONFIG_CODE.format(witness=str(tmp_path / "witness")))
    (folder / "modeling_own.py").write_text(MODEL_CODE)
    content = json.loads((folder / "config.json").read_text())
    content["model_type"] = "own_llama"
    content["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def test_refused_without_leave(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--trust-remote-code"):
        build(BuildConfig(str(checkpoint), tmp_path / "engine"), BuildProgress(verbose=False))
    assert not (tmp_path / "witness").exists()


def test_builds_with_leave(checkpoint: Path, tmp_path: Path) -> None:
    config = BuildConfig(str(checkpoint), tmp_path / "engine", trust_remote_code=True)
    manifest = build(config, BuildProgress(verbose=False))
    assert manifest.dims.model_type == "own_llama"
    assert manifest.verification.status == "passed"
    assert (tmp_path / "witness").exists()
