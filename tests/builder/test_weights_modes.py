"""One copy of the weights, three ways to get it; what an engine says about its build; which option wins."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from cli_fixtures import WEIGHTS, CliKit, Refusal, leftovers, write_checkpoint
from pop_engine.builder import pipeline, verify
from pop_engine.builder.cli import main
from pop_engine.builder.reference import reference_logits
from pop_engine.configs.build_config import BuildOptions, load_options
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime import Engine

pytest_plugins = ["cli_plugin"]
pytestmark = pytest.mark.usefixtures("recycled")
MODES = ["link", "copy", "reference"]


def build(model: Path, out: Path, *options: str) -> Manifest:
    assert main(["-m", str(model), "-o", str(out), "--max-batch-size", "2", *options]) == 0
    return Manifest.load(out)


def logits(engine: Path) -> NDArray[np.float32]:
    with Engine.load(engine) as loaded:
        slot = loaded.allocate_slot()
        return np.stack([loaded.prefill(slot, [5, 17, 200, 9]), loaded.decode_step([slot], [33])[0]])


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_same_engine(cli_kit: CliKit, tmp_path: Path, mode: str) -> None:
    manifest = build(cli_kit.checkpoint, tmp_path / "engine", "--weights", mode)
    assert manifest.weights is not None
    assert manifest.weights.mode == mode
    assert np.array_equal(logits(tmp_path / "engine"), logits(cli_kit.engine))
    stored = tmp_path / "engine" / "weights" / WEIGHTS
    assert stored.exists() == (mode != "reference")
    if stored.exists():
        assert stored.samefile(cli_kit.checkpoint / WEIGHTS) == (mode == "link")
    assert manifest.verification.status == "passed"


def test_linking_is_the_default(cli_kit: CliKit, tmp_path: Path) -> None:
    weights = build(cli_kit.checkpoint, tmp_path / "engine").weights
    assert weights is not None
    assert weights.mode == "link"


def test_reference_follows_the_checkpoint_and_not_the_engine(cli_checkpoint: Path, tmp_path: Path) -> None:
    build(cli_checkpoint, tmp_path / "engine", "--weights", "reference", "--no-verify")
    expected = logits(tmp_path / "engine")
    moved = (tmp_path / "engine").rename(tmp_path / "moved")
    assert np.array_equal(logits(moved), expected)
    cli_checkpoint.rename(tmp_path / "gone")
    with pytest.raises(EngineError, match=r"model\.safetensors: missing; the checkpoint it refers to has moved"):
        Engine.load(moved)


@pytest.mark.parametrize("mode", ["link", "copy"])
def test_engine_outlives_its_checkpoint(cli_checkpoint: Path, tmp_path: Path, mode: str) -> None:
    build(cli_checkpoint, tmp_path / "engine", "--weights", mode, "--no-verify")
    expected = logits(tmp_path / "engine")
    shutil.rmtree(cli_checkpoint)
    assert np.array_equal(logits(tmp_path / "engine"), expected)


def test_other_dtypes_are_converted(cli_kit: CliKit, tmp_path: Path) -> None:
    half = write_checkpoint(tmp_path / "bf16", torch.bfloat16)
    manifest = build(half, tmp_path / "engine")
    assert manifest.weights is not None
    assert (manifest.weights.mode, manifest.weights.dtype) == ("copy", "fp32")
    assert manifest.weights.num_bytes == 2 * sum(t.nbytes for t in _tensors(half).values())
    found, expected = logits(tmp_path / "engine"), logits(cli_kit.engine)
    assert not np.array_equal(found, expected)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def test_verification_is_recorded(cli_kit: CliKit, tmp_path: Path) -> None:
    record = Manifest.load(cli_kit.engine).verification
    assert (record.status, record.num_prompt_tokens, record.num_decode_steps) == ("passed", 60, 4)
    assert 0 < max(record.prefill_max_error, record.decode_max_error) <= record.tolerance
    skipped = build(cli_kit.checkpoint, tmp_path / "engine", "--no-verify").verification
    assert (skipped.status, skipped.reason) == ("skipped", "--no-verify")


def test_graphs_alone(cli_kit: CliKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = build(cli_kit.checkpoint, tmp_path / "engine", "--no-weights")
    assert manifest.weights is None
    assert (manifest.verification.status, manifest.verification.reason) == ("skipped", "built without weights")
    assert not (tmp_path / "engine" / "weights").exists()
    assert "none: this engine cannot run (--no-weights)" in capsys.readouterr().out


@pytest.mark.parametrize("step", ["prefill", "last decode step"])
def test_wrong_logits_fail_the_build(
    cli_kit: CliKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal, step: str
) -> None:
    def shifted(*arguments: object) -> torch.Tensor:
        expected = reference_logits(*arguments)  # type: ignore[arg-type]
        expected[0 if step == "prefill" else -1, 7] += 0.5
        return expected

    monkeypatch.setattr(verify, "reference_logits", shifted)
    out = tmp_path / "engine"
    code, message = refusal("pop-build", "-m", cli_kit.checkpoint, "-o", out, "--max-batch-size", "2")
    assert code == 1
    assert message.startswith("verification failed: logits differ from the PyTorch reference by 0.5, expected at most ")
    assert not out.exists()
    assert leftovers(out) == []


def test_engine_that_does_not_run_fails_the_build(
    cli_kit: CliKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    class Broken(pipeline.GraphWorkers):  # type: ignore[name-defined,misc]
        def results(self) -> object:
            graphs = super().results()
            self._jobs[0].out.write_bytes(b"no graph")
            return graphs

    monkeypatch.setattr(pipeline, "GraphWorkers", type("Broken", (Broken,), {}))
    out = tmp_path / "engine"
    code, message = refusal("pop-build", "-m", cli_kit.checkpoint, "-o", out, "--max-batch-size", "2")
    assert code == 1
    assert message.startswith("verification failed: the engine does not run (replay: error: ")
    assert "ONNX Runtime" in message
    assert leftovers(out) == []


def write_options(path: Path, **options: object) -> Path:
    # JSON is YAML too.
    path.write_text(json.dumps(options))
    return path


def test_flags_over_file_over_preset(tmp_path: Path) -> None:
    preset = BuildOptions(tail_layers=10, max_seq_len=100, max_batch_size=1)
    file = load_options(write_options(tmp_path / "o.yaml", **{"prune-ratio": 0.5, "max_seq_len": 200}))
    flags = BuildOptions(max_seq_len=300)
    assert flags.over(file).over(preset) == BuildOptions(prune_ratio=0.5, max_seq_len=300, max_batch_size=1)
    assert BuildOptions(tail_layers=2).over(file).over(preset).prune_ratio is None


def test_flags_and_file_reach_the_build(
    cli_kit: CliKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """A flag beats the file and the file beats the default, as the build sees them; it is stopped there."""

    class Stop(pipeline.GraphWorkers):  # type: ignore[name-defined,misc]
        def __init__(self, config: object, resolved: object, *arguments: object) -> None:
            seen.append(resolved)
            raise EngineError("stopped")

    seen: list[object] = []
    monkeypatch.setattr(pipeline, "GraphWorkers", Stop)
    file = write_options(tmp_path / "o.yaml", tail_layers=2, max_seq_len=48, boundary="two-step")
    arguments = ["-m", cli_kit.checkpoint, "-o", tmp_path / "engine", "--config", file, "--prune-ratio", "0"]
    assert refusal("pop-build", *arguments) == (1, "stopped")
    (resolved,) = seen
    assert resolved.plan.num_tail_layers == 0  # type: ignore[attr-defined]
    assert resolved.limits.max_seq_len == 48  # type: ignore[attr-defined]
    assert resolved.limits.max_batch_size == 8  # type: ignore[attr-defined]
    assert resolved.boundary == "two-step"  # type: ignore[attr-defined]
