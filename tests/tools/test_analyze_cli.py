"""pop-analyze: from end to end, stopped and continued, to the bit, and every refusal."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine_kit import SMALL, save_tiny_checkpoint
from pop_engine.builder.analysis import analyze as analysis
from pop_engine.builder.analysis.importance import GateGradients, gate_gradients
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import load_prune_plan
from pop_engine.tools.analyze_cli import main

SIZES = ("--num-samples", 20, "--max-len", 20, "--output-len", 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model; its own text begins with its eos token."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"), SMALL)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("one_torch_thread")
def test_an_analysis_from_end_to_end(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "plan.json", tmp_path / "plots" / "importance.svg"
    arguments = ("-m", checkpoint, "-o", out, *SIZES, "--policy", "ratio", 0.5, "--plot", plot)
    code, printed, errors = run(capsys, *arguments)
    assert (code, errors) == (0, "")
    assert "2 of 4 layers pruned at prefill, by ratio 0.5" in printed
    assert load_prune_plan(out, SMALL) == PrunePlan(SMALL, 2)
    assert [entry.name for entry in out.parent.iterdir()] == ["plan.json"], "the journal is left behind"
    content = json.loads(out.read_text())["importance"]
    assert [len(content[name]) for name in ("prefill", "decode", "tail_loss")] == [SMALL] * 3
    assert all(found["value"] > 0 and found["standard_error"] > 0 for found in content["decode"])
    assert (content["data"], content["num_samples"], content["mean_output_tokens"]) == ("self", 20, 6.0)
    circles = list(ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}circle"))
    titles = [circle[0].text or "" for circle in circles if len(circle)]
    assert [title.partition(":")[0] for title in titles] == [f"layer {index}" for index in (0, 1, 2, 0, 1, 2, 3)]
    code, _, errors = run(capsys, *arguments)
    assert code == 2
    assert f"--out {out}: exists already; add --force" in errors


@pytest.mark.usefixtures("one_torch_thread")
def test_a_stopped_run_continues_and_ends_the_same(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped inside the first group of sixteen, with half a line written. Another seed gives other numbers."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and then the other cat ran to the hat " * 30)
    arguments = ("-m", checkpoint, "--data", text, *SIZES)
    whole, parts, other = (tmp_path / name for name in ("whole.json", "parts.json", "other.json"))
    assert run(capsys, *arguments, "-o", whole)[0] == 0
    done: list[int] = []

    def counted(*given: object) -> GateGradients:
        if len(done) == 5 and not parts.with_name("again").exists():
            raise KeyboardInterrupt
        done.append(1)
        return gate_gradients(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(analysis, "gate_gradients", counted)
    assert run(capsys, *arguments, "-o", parts)[0] == 130
    assert not parts.exists()
    with (tmp_path / ".parts.json.samples").open("ab") as journal:
        journal.write(b'{"index":5,"gradi')
    parts.with_name("again").touch()
    assert run(capsys, *arguments, "-o", parts)[0] == 0
    assert len(done) == 20
    assert parts.read_bytes() == whole.read_bytes()
    assert run(capsys, *arguments, "-o", other, "--seed", 1)[0] == 0
    prefill = [json.loads(path.read_text())["importance"]["prefill"] for path in (whole, other)]
    assert prefill[0] != prefill[1]


@pytest.mark.nightly
@pytest.mark.usefixtures("one_torch_thread")
def test_a_killed_process_continues(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, journal = tmp_path / "plan.json", tmp_path / ".plan.json.samples"
    arguments = ("-m", checkpoint, *SIZES, "--num-samples", 400)
    command = [sys.executable, "-m", "pop_engine.tools.analyze_cli", *map(str, arguments), "-o", str(out)]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while (not journal.exists() or journal.read_bytes().count(b"\n") < 41) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.wait()
    num_done = journal.read_bytes().count(b"\n") - 1
    assert 40 <= num_done < 400
    done: list[int] = []

    def counted(*given: object) -> GateGradients:
        done.append(1)
        return gate_gradients(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(analysis, "gate_gradients", counted)
    assert run(capsys, *arguments, "-o", out)[0] == 0
    assert len(done) == 400 - num_done
    whole = tmp_path / "whole.json"
    assert run(capsys, *arguments, "-o", whole)[0] == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num-samples", "1"), "--num-samples 1: expected a whole number of at least 2"),
        (("--output-len", "0"), "--output-len 0: expected a whole number of at least 1"),
        (("--seed", "-1"), "--seed -1: expected a whole number of at least 0"),
        (("--max-len", "65"), "--max-len 65: expected at least 66"),
        (("--output-len", "127", "--max-len", "129"), "trained for 128 positions, too few for a prompt and"),
        (("--policy", "half"), "--policy half: expected last-third, knee, ratio R or budget NLL"),
        (("--data", "gone.txt"), "--data gone.txt: cannot be read"),
        (("--plot", "importance.png"), "--plot importance.png: expected a file that ends in .svg"),
        (("-o", "."), "--out .: is a folder; give a file in it"),
    ],
)
def test_bad_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = run(capsys, "-m", checkpoint, "-o", tmp_path / "new" / "plan.json", *arguments)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_model_without_weights_or_a_tokenizer(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path
) -> None:
    bare = shutil.copytree(checkpoint, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    (tmp_path / "text.txt").write_text("some words")
    code, _, errors = run(capsys, "-m", bare, "--data", tmp_path / "text.txt", "-o", tmp_path / "plan.json")
    assert code == 2
    assert "has no tokenizer, so text cannot be read; use --data self" in errors
