"""pop-calibrate and the calibration flags of pop-build: one calibration from end to end, and every refusal."""

import json
import shutil
from pathlib import Path

import pytest

from engine_kit import SMALL, save_tiny_checkpoint
from pop_engine.builder.analysis.calibrate_cli import main
from pop_engine.builder.analysis.calibration import load_calibration
from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.errors import UsageError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has a first token."""
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("model"), SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0}))
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_calibration_from_end_to_end(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "calibration"
    sizes = ("--num-tokens", 3000, "--context-len", 32, "--num-held-out", 12, "--tail-layers", 3)
    code, printed, errors = run(capsys, "-m", checkpoint, "--data", "self", "-o", out, *sizes)
    assert (code, errors) == (0, "")
    assert "benefit" in printed
    assert "layer 2" in printed
    record = load_calibration(out).record
    assert record.data == "self"
    assert [gain.layer_idx for gain in record.layers] == [2, 3]
    code, _, errors = run(capsys, "-m", checkpoint, "--data", "self", "-o", out, *sizes)
    assert code == 2
    assert "holds a calibration already; add --force" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "gone.txt"), "--data gone.txt: cannot be read"),
        (("--data", "self", "--num-tokens", "0"), "--num-tokens 0: expected a whole number"),
        (("--data", "self", "--context-len", "-1"), "--context-len -1: expected a whole number"),
        (("--data", "self", "--tail-layers", "1"), "a tail of 1 has nothing to calibrate"),
        (("--data", "self", "--tail-layers", "4"), "--tail-layers 4: expected 0 to 3"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    tail = () if "--tail-layers" in arguments else ("--tail-layers", 3)
    code, _, errors = run(capsys, "-m", checkpoint, "-o", tmp_path / "out", *arguments, *tail)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, _, errors = run(capsys, "-m", checkpoint, "--data", "self", "-o", tmp_path, "--force")
    assert code == 2
    assert "is in use and holds no calibration" in errors


def test_text_needs_a_tokenizer(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text("some words")
    code, _, errors = run(capsys, "-m", bare, "--data", text, "--tail-layers", 3, "-o", tmp_path / "out")
    assert code == 2
    assert "has no tokenizer, so text cannot be read; use --data self" in errors


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="--calibration and --calibrate"):
        BuildConfig("model", Path("out"), calibration=Path("c"), calibrate="self")
    with pytest.raises(UsageError, match="--calibrate: needs the model's weights"):
        BuildConfig("model", Path("out"), calibrate="self", with_weights=False)
    with pytest.raises(UsageError, match="--boundary-window 0: expected a whole number of at least 1"):
        BuildOptions(boundary_window=0)
