"""Peers compute what transformers' own generate does, on a tiny checkpoint. Those not installed are skipped."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from engine_kit import SMALL, TinyModels, random_tokens
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest, ModelSource
from pop_engine.tools.bench.peers.checkpoint import peer_checkpoint
from pop_engine.tools.bench.peers.registry import PEERS, installed_version
from pop_engine.tools.bench.subject import Subject, time_batch
from pop_engine.tools.bench_message import BenchRequest

PROMPTS = tuple(tuple(random_tokens(7, seed)) for seed in (1, 2))
NUM_STEPS = 5
FP32 = [
    # Compiling takes a minute.
    pytest.param(kind, id=kind.name, marks=pytest.mark.nightly if "compiled" in kind.name else ())
    for kind in PEERS
    if kind.dtype == "fp32" and not kind.reads_gguf
]


def greedy(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    given = torch.tensor(prompts)
    with torch.no_grad():
        found = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=1 + NUM_STEPS,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    rows: list[list[int]] = found[:, given.shape[1] :].tolist()
    return rows


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("kind", FP32)
def test_greedy_tokens(kind: Any, tiny: TinyModels, tmp_path: Path) -> None:
    if installed_version(kind) is None:
        pytest.skip(f"needs {kind.distribution}")
    model = tiny.checkpoint()
    if kind.prepare is not None:
        kind.prepare(model, tmp_path)
        model = tmp_path
    subject: Subject = kind.load(model, 1)
    # Twice: what the first batch left must not be seen by the second, which is of another size.
    for prompts in (PROMPTS, PROMPTS[:1]):
        reply = time_batch(subject, BenchRequest(prompts, NUM_STEPS - 1, num_settling_steps=1))
        assert [list(tokens) for tokens in reply.tokens] == greedy(tiny.hf_model(), prompts)
        assert (len(reply.ttft_ms), len(reply.step_ms)) == (len(prompts), NUM_STEPS - 1)


def test_a_checkpoint_folder_is_used_as_it_is(tiny: TinyModels, tmp_path: Path) -> None:
    directory = tiny.directory((SMALL, 1), "one-pass")
    found = peer_checkpoint(directory, Manifest.load(directory), tmp_path / "work", None)
    assert (found.folder, found.dtype, found.gguf) == (tiny.checkpoint(), "fp32", None)
    assert not (tmp_path / "work").exists()
    with pytest.raises(UsageError, match="built without weights, so peers have nothing to run"):
        peer_checkpoint(directory, replace(Manifest.load(directory), weights=None), tmp_path, None)


def test_a_folder_is_made_of_the_engines_own_weights(tiny: TinyModels, smollm2_gguf: Path, tmp_path: Path) -> None:
    """The config is the GGUF file's; the weights here are another model's, which nobody looks at but this test."""
    directory = tiny.directory((SMALL, 1), "one-pass")
    manifest = replace(Manifest.load(directory), source=ModelSource("smollm2-135m", str(smollm2_gguf)))
    found = peer_checkpoint(directory, manifest, tmp_path, None)
    assert (found.folder, found.gguf) == (tmp_path / "checkpoint", smollm2_gguf)
    config = AutoConfig.from_pretrained(found.folder)
    assert (config.architectures, config.num_hidden_layers, config.dtype) == (["LlamaForCausalLM"], 30, torch.float32)
    original = AutoModelForCausalLM.from_pretrained(tiny.checkpoint()).state_dict()
    with safe_open(found.folder / "model.safetensors", "pt") as content:
        names = set(content.keys())
        assert names == original.keys() - {"lm_head.weight"}
        assert all(torch.equal(content.get_tensor(name), original[name]) for name in names)
    made = (found.folder / "config.json").stat().st_mtime_ns
    assert peer_checkpoint(directory, manifest, tmp_path, None) == found
    assert (found.folder / "config.json").stat().st_mtime_ns == made
