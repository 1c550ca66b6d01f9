"""A tiny checkpoint and one engine built from it, for the tests of the three commands.

The fixtures are in cli_plugin.py, which test modules load by name: `pytest_plugins = ["cli_plugin"]`.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from pop_engine.builder.cli import main as pop_build
from pop_engine.builder.graph_workers import BuiltGraphs, GraphWorkers
from pop_engine.runtime.cli import main as pop_run
from pop_engine.tools.inspect import main as pop_inspect

MAX_SEQ_LEN = 64
NUM_LAYERS = 3
VOCAB_SIZE = 288
NUM_SLOTS = 2
WEIGHTS = "model.safetensors"
BOS, EOS = "<bos>", "<eos>"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Command and arguments to exit code and message.
Refusal = Callable[..., tuple[int, str]]
COMMANDS: dict[str, Callable[[list[str] | None], int]] = {
    "pop-build": pop_build,
    "pop-run": pop_run,
    "pop-inspect": pop_inspect,
}


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


class RecyclingWorkers(GraphWorkers):
    """Traces each pair of graphs once, in two processes as ever, and hands it out again for the same job.

    Tracing is most of a build, and depends on nothing but the job.
    """

    kept: ClassVar[dict[str, tuple[BuiltGraphs, list[bytes]]]] = {}

    def __enter__(self) -> "RecyclingWorkers":
        if self._key not in self.kept:
            super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._key not in self.kept:
            super().__exit__(*exception)

    def results(self) -> BuiltGraphs:
        if self._key in self.kept:
            graphs, contents = self.kept[self._key]
            for job, content in zip(self._jobs, contents, strict=True):
                job.out.write_bytes(content)
            return graphs
        graphs = super().results()
        super().__exit__(None, None, None)
        self.kept[self._key] = graphs, [job.out.read_bytes() for job in self._jobs]
        return graphs

    @property
    def _key(self) -> str:
        """All that a graph depends on: a weight's place counts, the name that it has in the checkpoint does not."""
        places = [(name, entry.file, entry.offset) for name, entry in self._jobs[0].layout.entries.items()]
        # The graph's dtype is in its spec; the config says what the checkpoint was saved in.
        config = self._jobs[0].config.to_dict() | {"dtype": None}
        return repr([(config, job.spec, job.lowered, job.dump_dir, places) for job in self._jobs])


@dataclass(frozen=True)
class CliKit:
    """What is made once: an engine, and a checkpoint whose weights lie as that engine's do, so that graphs recycle."""

    checkpoint: Path
    engine: Path


def one_line(command: str, err: str) -> str:
    """The message on stderr, which must be all that is there."""
    assert err.count("\n") <= 1, err
    prefix = f"{command}: error: "
    assert err.startswith(prefix), err
    return err.removeprefix(prefix).rstrip("\n")


def in_process_of_its_own(command: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run one of the commands as its users do."""
    modules = {"pop-build": "builder.cli", "pop-run": "runtime.cli", "pop-inspect": "tools.inspect"}
    line = [sys.executable, "-m", f"pop_engine.{modules[command]}", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, **options)


def leftovers(out: Path) -> list[str]:
    """What a build into `out` has left beside it."""
    return sorted(path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.pop-build"))


def change_json(path: Path, **values: object) -> None:
    """Set some keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A small file system in memory, where this process may mount one."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and mount, for a file system that is full or read-only")
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)
