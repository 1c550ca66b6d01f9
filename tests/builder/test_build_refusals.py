"""What pop-build refuses: each bad input with its one line and its exit code, and nothing left at --out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import BloomConfig

from cli_fixtures import (
    WEIGHTS,
    CliKit,
    Refusal,
    change_json,
    in_process_of_its_own,
    leftovers,
    one_line,
    write_checkpoint,
)
from pop_engine.builder.cli import main
from pop_engine.builder.export.trace import GraphSpec, trace_graph
from pop_engine.configs.build_config import SUPPORTED_TARGETS
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import CacheShape, KVShape, decode_contract
from pop_engine.configs.prune_plan import PrunePlan

pytest_plugins = ["cli_plugin"]


@pytest.fixture
def refused(refusal: Refusal, tmp_path: Path) -> Refusal:
    """Build into a new folder, which must fail and leave nothing."""

    def run(model: object, *arguments: object) -> tuple[int, str]:
        out = tmp_path / "out"
        found = refusal("pop-build", "-m", model, "-o", out, *arguments)
        assert not out.exists()
        assert leftovers(out) == []
        return found

    return run


DTYPES = ", ".join(SUPPORTED_TARGETS["ort-cpu"])
FLAGS: list[tuple[list[str], str]] = [
    (["--tail-layers", "30"], "--tail-layers 30: expected 0 to 29 for a model of 30 layers; at least one layer must "),
    (["--tail-layers", "-1"], "--tail-layers -1: expected 0 to 29 for a model of 30 layers; at least one layer must "),
    (["--prune-ratio", "1"], "--prune-ratio 1.0: expected a number from 0 up to, but not including, 1"),
    (["--prune-ratio", "-0.1"], "--prune-ratio -0.1: expected a number from 0 up to, but not including, 1"),
    (["--prune-ratio", "nan"], "--prune-ratio nan: expected a number from 0 up to, but not including, 1"),
    (
        ["--max-seq-len", "8193"],
        "--max-seq-len 8193: the model was trained for 8192 positions; give 8192 or less",
    ),
    (["--max-seq-len", "0"], "--max-seq-len 0: expected a whole number of at least 1"),
    (["--max-batch-size", "0"], "--max-batch-size 0: expected a whole number of at least 1"),
    (["--max-prefill-len", "-5"], "--max-prefill-len -5: expected a whole number of at least 1"),
    (["--dtype", "fp16"], f"--dtype fp16: target ort-cpu runs {DTYPES}; leave --dtype out"),
    (["--target", "ort-cuda", "--dtype", "fp32"], "--dtype fp32: target ort-cuda runs bf16, fp16; leave --dtype out"),
    (["--weights", "link"], "--weights link: there are no weights to link; leave --weights out"),
    (["--weights", "reference"], "--weights reference: there are no weights to reference; leave --weights out"),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS)
def test_flags(refused: Refusal, flags: list[str], message: str) -> None:
    code, found = refused("smollm2-135m", "--no-weights", *flags)
    assert code == 2
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "x"], "the following arguments are required: -o/--out"),
        (["-m", "x", "-o", "y", "--tail-layers", "third"], "argument --tail-layers: invalid int value: 'third'"),
        (
            ["-m", "x", "-o", "y", "--tail-layers", "1", "--prune-ratio", "0.3"],
            "argument --prune-ratio: not allowed with argument --tail-layers",
        ),
        (["-m", "x", "-o", "y", "--boundary", "none"], "argument --boundary: invalid choice: 'none' (choose from "),
    ],
)
def test_what_argparse_refuses(usage_refusal: Refusal, arguments: list[str], message: str) -> None:
    code, found = usage_refusal("pop-build", *arguments)
    assert code == 2
    assert found.startswith(message)


CONFIGS: list[tuple[bytes, str]] = [
    (b"tail_layer: 3", ": unknown option 'tail_layer'; expected one of target, "),
    (b"max-seq-len: long", ": Expected `int | null`, got `str` - at `$.max_seq_len`"),
    (b"boundary: no-pass", ": Invalid enum value 'no-pass' - at `$.boundary`"),
    (b"- tail_layers", ": expected a mapping of option names to values, found list"),
    (b"tail_layers: 1\nprune_ratio: 0.5", ": --tail-layers and --prune-ratio: both say how long the tail is; give "),
    (b"max_batch_size: 0", ": --max-batch-size 0: expected a whole number of at least 1"),
    (b"tail_layers: [", ": cannot be read as YAML ("),
    (b"weights: \xff", ": cannot be read as YAML ("),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_config_file(refused: Refusal, tmp_path: Path, content: bytes, message: str) -> None:
    config = tmp_path / "options.yaml"
    config.write_bytes(content)
    code, found = refused("smollm2-135m", "--no-weights", "--config", config)
    assert code == 2
    assert found.startswith(f"--config {config}{message}")


def test_config_file_that_is_absent(refused: Refusal) -> None:
    code, message = refused("smollm2-135m", "--config", "/no/options.yaml")
    assert (code, message.startswith("--config /no/options.yaml: cannot be read as YAML (")) == (2, True)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2-135m", "--model 'smolm2-135m': neither a preset, an existing path nor a hub id (org/name); did you "),
        ("/no/such/checkpoint", "--model /no/such/checkpoint: no such file or folder; expected a checkpoint folder"),
        ("./model.gguf", "--model ./model.gguf: no such file or folder; expected a checkpoint folder or a .gguf file"),
    ],
)
def test_model_that_is_nothing(refused: Refusal, model: str, message: str) -> None:
    code, found = refused(model)
    assert code == 2
    assert found.startswith(message)


def test_hub_model_that_is_absent_and_offline(refused: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **named: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("pop_engine.builder.checkpoint.hub.snapshot_download", fail)
    assert refused("some-org/some-model", "--revision", "v2") == (
        2,
        "some-org/some-model at revision v2: not in the local hub cache, and the hub cannot be reached; "
        "get it with `hf download some-org/some-model` where there is a network",
    )


def config_of(folder: Path, **values: object) -> None:
    change_json(folder / "config.json", **values)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def lose_a_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    files = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))


def poison(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no config.json": (lambda c: (c / "config.json").unlink(), 2, "{c}/config.json: missing; expected a Hugging Face"),
    "config cut off": (lambda c: (c / "config.json").write_text('{"model_type":'), 1, "{c}/config.json: not JSON ("),
    "bad value": (lambda c: config_of(c, hidden_size="wide"), 2, "{c}/config.json: not a valid config of model_type "),
    "encoder-decoder": (
        lambda c: config_of(c, model_type="t5"),
        2,
        "{c}/config.json: t5 is an encoder-decoder model; prefill-only pruning needs a decoder-only model",
    ),
    "state space": (lambda c: config_of(c, model_type="mamba"), 2, "{c}/config.json: mamba has state-space or linear"),
    "unknown family": (lambda c: config_of(c, model_type="new"), 2, "{c}/config.json: model_type 'new' is not known"),
    "remote code": (
        lambda c: config_of(c, model_type="new", auto_map={"AutoConfig": "configuration_new.New"}),
        2,
        "{c}/config.json: model_type 'new' needs Python code from the checkpoint (auto_map); read that code, then",
    ),
    "quantized": (
        lambda c: config_of(c, quantization_config={"quant_method": "awq"}),
        2,
        "{c}/config.json: weights quantized with 'awq' cannot be read; use the unquantized checkpoint or a GGUF file",
    ),
    "no weights": (lambda c: (c / WEIGHTS).unlink(), 2, "{c}: no *.safetensors file in it; expected weights, or"),
    "pickled weights": (
        lambda c: (c / WEIGHTS).rename(c / "pytorch_model.bin"),
        2,
        "{c}: its weights are pickled .bin files, which are not read; convert them with transformers: ",
    ),
    "missing shard": (
        lose_a_shard,
        1,
        "{c}/model-00002-of-00002.safetensors: missing, but model.safetensors.index.json lists it; fetch the file",
    ),
    "truncated": (
        lambda c: (c / WEIGHTS).write_bytes((c / WEIGHTS).read_bytes()[:-8]),
        1,
        "{c}/model.safetensors: truncated: tensor ",
    ),
    "Git LFS pointer": (
        lambda c: (c / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        1,
        "{c}/model.safetensors: a Git LFS pointer, not the weights themselves; fetch them with `git lfs pull`",
    ),
    "wrong shape": (
        lambda c: rewrite(c, lambda tensors: tensors.update({NORM: torch.ones(31)})),
        1,
        f"{{c}}/model.safetensors: tensor {NORM} has shape [31], config.json makes it [32]; the two are not of the "
        "same model",
    ),
    "incomplete": (
        lambda c: rewrite(c, lambda tensors: tensors.pop(NORM)),
        1,
        f"{{c}}: no tensor for parameter {NORM}; the checkpoint is incomplete or of another model",
    ),
    "NaN": (poison, 1, f"{{c}}/model.safetensors: tensor {NORM} holds NaN or infinity; fetch the file again or use"),
    "damaged tokenizer": (
        lambda c: (c / "tokenizer.json").write_text("{"),
        1,
        "{c}/tokenizer.json: not a readable tokenizer (",
    ),
}


@pytest.mark.usefixtures("recycled")
@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_that_cannot_be_built(refused: Refusal, cli_checkpoint: Path, damage: str) -> None:
    inflict, code, message = DAMAGES[damage]
    inflict(cli_checkpoint)
    found = refused(cli_checkpoint)
    assert found[0] == code
    assert found[1].startswith(message.format(c=cli_checkpoint))


def test_ways_to_name_a_local_checkpoint_wrongly(refused: Refusal, cli_kit: CliKit) -> None:
    folder = cli_kit.checkpoint
    message = f"--revision v1: {folder} is a local path; leave --revision out"
    assert refused(folder, "--revision", "v1") == (2, message)
    message = f"--model {folder / WEIGHTS}: expected a checkpoint folder or a .gguf file; give its folder, {folder}"
    assert refused(folder / WEIGHTS) == (2, message)


def test_gguf_file_that_is_none(refused: Refusal, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF but not really")
    code, message = refused(path)
    assert code == 1
    assert message.startswith(f"{path}: ")


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_weights_that_cannot_be_shared(refused: Refusal, tmp_path: Path, mode: str) -> None:
    folder = write_checkpoint(tmp_path / "bf16", torch.bfloat16)
    code, message = refused(folder, "--weights", mode)
    assert code == 2
    assert message.startswith(f"--weights {mode}: tensor ")
    assert message.endswith(" is stored as BF16 and the engine is fp32; use --weights copy")


def test_model_class_with_an_attention_of_its_own() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    cache = CacheShape((KVShape(4, 8),) * 2, 32, "fp32")
    spec = GraphSpec("decode", PrunePlan(2, 1), "one-pass", decode_contract(cache, 64), "fp32")
    with pytest.raises(EngineError) as caught:
        trace_graph(config, spec)
    message = str(caught.value)
    assert "bloom" in message.lower()
    assert ": the decode graph cannot be traced (" in message
    assert message.endswith("); --verbose shows where")


def test_message_of_a_process_of_its_own(tmp_path: Path) -> None:
    result = in_process_of_its_own("pop-build", "-m", "/no/checkpoint", "-o", tmp_path / "out")
    assert (result.returncode, result.stdout) == (2, "")
    assert one_line("pop-build", result.stderr).startswith("--model /no/checkpoint: no such file or folder; ")
    assert list(tmp_path.iterdir()) == []


def test_verbose_shows_the_traceback_and_then_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "/no/checkpoint", "-o", str(tmp_path / "out"), "--verbose"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("pop-build: error: --model /no/checkpoint: ")
