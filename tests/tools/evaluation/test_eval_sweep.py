"""A sweep over tail lengths, with engines that are built before and, nightly, by pop-build itself."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from engine_kit import SMALL, TinyModels
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import MANIFEST_NAME
from pop_engine.tools.evaluation import sweep_engines
from pop_engine.tools.evaluation.builds import Command
from pop_engine.tools.evaluation.cli import main
from pop_engine.tools.evaluation.result import SweepResult

PROMPTS = ["the cat sat on", "then the other cat", "hat hat hat mat", "user assistant system"]
ARGUMENTS = ["--no-chat", "--threads", "1", "--max-tokens", "4"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


@pytest.fixture
def builds(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the processes that build: hands out engines of the same kind, and refuses to calibrate."""
    asked: list[str] = []

    def hand_out(model: str, out: Path, arguments: Sequence[str], origin: str) -> None:
        assert model == str(tiny.checkpoint())
        length = int(arguments[arguments.index("--tail-layers") + 1])
        asked.append(" ".join(arguments))
        shutil.copytree(tiny.directory((SMALL, length), "one-pass"), out)

    def refuse(command: Command, arguments: Sequence[str], origin: str) -> None:
        asked.append(command.name)
        raise EngineError(f"{origin}: {command.name}: calibration gains nothing")

    monkeypatch.setattr(sweep_engines, "build", hand_out)
    monkeypatch.setattr(sweep_engines, "run_command", refuse)
    return asked


def test_tails_are_measured_and_the_longest_is_named(
    tiny: TinyModels, builds: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page, work = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "work"
    command = [str(tiny.checkpoint()), "--sweep", "3,0,1", "--data", str(data), *ARGUMENTS, "--work-dir", str(work)]
    command += ["--calibrate", "self", "--max-loss", "1", "--json", str(out), "--html", str(page)]
    assert main(command) == 0
    result = msgspec.json.decode(out.read_bytes(), type=SweepResult)
    kinds = [(row.num_tail_layers, row.calibrated, row.scores is not None) for row in result.rows]
    assert kinds == [(0, False, True), (1, False, True), (1, True, False), (3, False, True), (3, True, False)]
    exact, longest = result.rows[1].scores, result.rows[3].scores
    assert exact is not None
    assert longest is not None
    # A tail of one layer changes nothing (DESIGN.md, Traps).
    assert exact.kl.value == pytest.approx(0, abs=1e-6)
    assert exact.nll_pop.value == pytest.approx(exact.nll_full.value, abs=1e-5)
    assert longest.kl.value > 0.01
    # The scored answers are the full model's own, so what differs from it loses.
    assert result.longest == 1
    refused = "--calibrate self, 3 tail layers: pop-calibrate: calibration gains nothing"
    assert result.rows[4].refused == refused
    printed = capsys.readouterr().out
    assert "longest tail within --max-loss 1: 1 tail layers, " in printed
    for text in (printed, page.read_text()):
        assert f"3 tail layers, calibrated: {refused}" in text
    # Once more: what was built is used again, what was refused is tried again.
    builds.clear()
    assert main(command) == 0
    assert builds == ["pop-calibrate"] * 2
    assert main([*command, "--boundary-window", "2"]) == 2
    assert "holds what was made for another model or with other options" in capsys.readouterr().err


def test_options_reach_the_builds_and_nothing_is_left(
    tiny: TinyModels, builds: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    command = [str(tiny.checkpoint()), "--sweep", "1", "--data", str(data), *ARGUMENTS, "--limit", "1"]
    assert main([*command, "--boundary-window", "2", "--max-seq-len", "48"]) == 0
    assert builds == [
        "--tail-layers 0 --max-seq-len 48",
        "--tail-layers 1 --max-seq-len 48 --boundary-window 2",
    ]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_tails_that_the_model_does_not_have(
    tiny: TinyModels, builds: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tiny.checkpoint()), "--sweep", "1,4", "--data", str(data)]) == 2
    assert "--sweep 4: the model has 4 layers; give 3 at most" in capsys.readouterr().err


def test_a_folder_in_use(tiny: TinyModels, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(tiny.checkpoint()), "--sweep", "1", "--data", str(data), "--work-dir", str(tmp_path)]
    assert main(command) == 2
    assert "is in use; choose an empty or a new folder" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_commands_build_and_calibrate(tiny: TinyModels, data: Path, tmp_path: Path) -> None:
    """Some five processes that import torch, half a minute together."""
    work, out = tmp_path / "work", tmp_path / "out.json"
    command = [str(tiny.checkpoint()), "--sweep", "0,2", "--data", str(data), *ARGUMENTS, "--max-seq-len", "48"]
    command += ["--calibrate", "self", "--calibrate-tokens", "500", "--work-dir", str(work), "--json", str(out)]
    assert main(command) == 0
    result = msgspec.json.decode(out.read_bytes(), type=SweepResult)
    plain, calibrated = result.rows[1:]
    assert plain.scores is not None
    assert calibrated.scores is not None or "pop-calibrate" in str(calibrated.refused)
    assert (work / "tail-2" / MANIFEST_NAME).is_file()


@pytest.mark.nightly
def test_a_full_engine_is_built_from_the_model(
    tiny: TinyModels, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = str(tiny.directory((SMALL, 3), "one-pass"))
    assert main([engine, "--against", str(tiny.checkpoint()), "--data", str(data), *ARGUMENTS]) == 0
    assert "benefit kept" in capsys.readouterr().out
    assert main([engine, "--against", "no/such/model", "--data", str(data), *ARGUMENTS]) == 2
    assert "--against no/such/model: pop-build: " in capsys.readouterr().err
