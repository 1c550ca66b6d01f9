"""A tiny checkpoint and one engine built from it, for the tests of the three commands.

Test modules load this with `pytest_plugins = ["cli_fixtures"]`: the engine is then built once for all of them, and
every test works on a copy of its own.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from pop_engine.builder.cli import main as pop_build
from pop_engine.runtime.cli import main as pop_run
from pop_engine.tools.inspect import main as pop_inspect

MAX_SEQ_LEN = 64
NUM_LAYERS = 3
VOCAB_SIZE = 288
BOS, EOS = "<bos>", "<eos>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
COMMANDS = {"pop-build": pop_build, "pop-run": pop_run, "pop-inspect": pop_inspect}


def tiny_config(**changes: object) -> LlamaConfig:
    values: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_SEQ_LEN,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "initializer_range": 0.5,
    }
    return LlamaConfig(**(values | changes))  # type: ignore[arg-type]


def write_checkpoint(directory: Path, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB") -> Path:
    """A Llama of 3 layers with random weights, a tokenizer of one token a byte and a chat template."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: token_id for token_id, token in enumerate([BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE})
    )
    return directory
