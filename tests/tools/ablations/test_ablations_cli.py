"""pop-eval --ablations from end to end on a tiny model: scores against Hugging Face, files, what is kept, refusals."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch

from engine_kit import TinyModels
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import MANIFEST_NAME
from pop_engine.tools.ablations import run as ablation_run
from pop_engine.tools.ablations.catalogue import NAMES
from pop_engine.tools.ablations.result import AblationResult
from pop_engine.tools.evaluation.cli import main
from pop_reference import decode, pop_prefill

LINES: list[dict[str, str]] = [
    {"prompt": "the cat sat on", "answer": " the mat"},
    {"text": "the cat sat on the mat and then the other cat ran to the hat"},
    {"prompt": "then the other"},
]
OPTIONS = ["--no-chat", "--threads", "1", "--max-tokens", "4", "--tail-layers", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, and other text to fit on."""
    path = tmp_path_factory.mktemp("ablations")
    (path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (path / "notes.txt").write_text("user assistant system and then the other cat ran to the hat on the mat " * 60)
    return path


def command(model: Path, folder: Path, *arguments: str) -> list[str]:
    return [str(model), "--data", str(folder / "data.jsonl"), *OPTIONS, *arguments]


@pytest.fixture(scope="module")
def run(tiny: TinyModels, folder: Path) -> tuple[AblationResult, str]:
    """All ablations: the JSON and the page."""
    files = folder / "out.json", folder / "out.html"
    arguments = ["--ablations", "all", "--calibrate", str(folder / "notes.txt"), "--calibrate-tokens", "900"]
    arguments += ["--work-dir", str(folder / "work"), "--json", str(files[0]), "--html", str(files[1])]
    assert main(command(tiny.checkpoint(), folder, *arguments)) == 0
    return msgspec.json.decode(files[0].read_bytes(), type=AblationResult), files[1].read_text()


def prompts_and_answers(model: Any, tiny: TinyModels) -> list[tuple[list[int], list[int]]]:
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tiny.checkpoint() / "tokenizer.json")).encode
    first, text, greedy = (encode(line.get("prompt", line.get("text", ""))).ids for line in LINES)
    answer = model.generate(torch.tensor([greedy]), max_new_tokens=4, do_sample=False)[0, len(greedy) :].tolist()
    return [(first, encode(" the mat").ids[:4]), (text[:-4], text[-4:]), (greedy, answer)]


def test_scores_are_those_of_the_reference(run: tuple[AblationResult, str], tiny: TinyModels) -> None:
    result, model = run[0], tiny.hf_model()
    rows = {row.name: row for row in result.rows}
    assert tuple(rows) == NAMES
    cases = prompts_and_answers(model, tiny)
    full = [nll(torch.cat([pop_prefill(model, p, 0)[0][None], *rest(model, p, a, 0)]), a) for p, a in cases]
    pop = [nll(torch.cat([pop_prefill(model, p, 3)[0][None], *rest(model, p, a, 3)]), a) for p, a in cases]
    none = [nll(decode_alone(model, p[-1:], a), a) for p, a in cases]
    assert result.full.nlls == pytest.approx(full, abs=1e-4)
    assert result.full.nlls_none == pytest.approx(none, abs=1e-4)
    scores = rows["pop"].scores
    assert scores is not None
    assert scores.nlls == pytest.approx(pop, abs=1e-4)
    assert scores.nll.value == pytest.approx(sum(pop) / 3, abs=1e-4)
    if scores.benefit is not None:
        kept = sum(n - p for n, p in zip(none, pop, strict=True)) / sum(n - f for n, f in zip(none, full, strict=True))
        assert scores.benefit.value == pytest.approx(kept, rel=1e-2)
    assert rows["first"].layers == (0, 1, 2)
    assert rows["remove-last"].layers == rows["pop"].layers == (1, 2, 3)
    assert len(rows["shortgpt"].layers) == 3
    assert len(rows["shortgpt-25"].layers) == 1


def rest(model: Any, prompt: list[int], answer: list[int], tail: int) -> list[torch.Tensor]:
    cache = pop_prefill(model, prompt, tail)[1]
    return [decode(model, cache, [token]) for token in answer[:-1]]


def decode_alone(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return rows


def nll(rows: torch.Tensor, answer: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(rows, torch.tensor(answer)))


def test_the_page_shows_every_row_and_a_bar_for_each(run: tuple[AblationResult, str]) -> None:
    result, page = run
    root = ElementTree.fromstring(page.partition("\n")[2])
    cells = {cell.text for cell in root.iter("td")}
    assert {row.title for row in result.rows if row.scores} <= cells
    for row in result.rows:
        assert row.scores is None or f"{row.scores.nlls[0]:.4f}" in page
    charts = [group for group in root.iter("g") if group.find("rect") is not None]
    with_benefit = [row for row in result.rows if row.scores and row.scores.benefit]
    # Two more in the legend.
    assert len(charts) == len(with_benefit) + 2


def test_what_was_measured_is_not_measured_again(
    run: tuple[AblationResult, str],
    tiny: TinyModels,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: object) -> None:
        raise EngineError("nothing is to be scored again")

    monkeypatch.setattr(ablation_run, "score_variant", refuse)
    monkeypatch.setattr(ablation_run, "score_full", refuse)
    shared = ["--calibrate", str(folder / "notes.txt"), "--work-dir", str(folder / "work")]
    arguments = ["--ablations", "first,pop", *shared, "--calibrate-tokens", "900", "--json", str(folder / "again.json")]
    assert main(command(tiny.checkpoint(), folder, *arguments)) == 0
    again = msgspec.json.decode((folder / "again.json").read_bytes(), type=AblationResult)
    assert again.rows == tuple(row for row in run[0].rows if row.name in ("first", "pop"))
    assert "POP on the first layers" in capsys.readouterr().out
    assert main(command(tiny.checkpoint(), folder, "--ablations", "pop", *shared)) == 2
    assert "holds what was made for another model or with other options" in capsys.readouterr().err


def test_what_a_model_cannot_have_is_a_row_that_says_so(
    tiny: TinyModels, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ablations", "calibrated,pop", "--calibrate", "self", "--limit", "1", "--tail-layers", "1"]
    assert main(command(tiny.checkpoint(), folder, *arguments)) == 0
    printed = capsys.readouterr().out
    assert "POP, calibrated: calibration: a tail of 1 has nothing to calibrate" in printed
    assert "not possible" in next(line for line in printed.splitlines() if line.startswith("POP, calibrated  "))


REFUSALS: list[tuple[list[str], str]] = [
    (["MODEL", "--ablations", "pop", "--sweep", "1"], "--ablations: cannot be combined with --sweep"),
    (["MODEL", "--ablations", "pop", "--against", "MODEL"], "--against: not used with --ablations"),
    (["MODEL", "--ablations", "pop", "--max-loss", "5"], "--max-loss: not used with --ablations"),
    (["MODEL", "--ablations", "pop", "--max-seq-len", "5"], "--max-seq-len: only used with --sweep"),
    (["MODEL", "--sweep", "1", "--tail-layers", "1"], "--tail-layers: only used with --ablations"),
    (["MODEL", "--ablations", "wanda,pop"], "--ablations wanda: fitted on text; give --calibrate FILE|self"),
    (["MODEL", "--ablations", "all", "--calibrate", "DATA"], "is the text to be scored, which would flatter it"),
    (["MODEL", "--ablations", "all", "--calibrate", "/no/text"], "--calibrate /no/text: no such file"),
    (["MODEL", "--ablations", "pop", "--calibrate-tokens", "9"], "--calibrate-tokens: only used with --calibrate"),
    (["MODEL", "--ablations", "pop", "--tail-layers", "4"], "--tail-layers 4: expected 0 to 3"),
    (["MODEL", "--ablations", "pop", "--work-dir", "DATA"], "is a file; choose a folder"),
    (["MODEL", "--ablations", "pop", "--work-dir", "FOLDER"], "is in use; choose an empty or a new folder"),
    (["MODEL", "--ablations", "pop", "--max-tokens", "127"], "line 1: "),
    (["/no/model", "--ablations", "pop"], "no such file or folder"),
    (["ENGINE", "--ablations", "pop"], "is an engine; --ablations change the model itself"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_refusals_are_one_line(
    arguments: list[str],
    message: str,
    tiny: TinyModels,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / MANIFEST_NAME).touch()
    names = {"MODEL": tiny.checkpoint(), "ENGINE": tmp_path, "FOLDER": folder, "DATA": folder / "data.jsonl"}
    given = [str(names.get(argument, argument)) for argument in arguments]
    code = main([*given, "--data", str(folder / "data.jsonl")])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured.err
    assert captured.err.startswith("pop-eval: error: ")
    assert message in captured.err


@pytest.mark.parametrize("arguments", [["--ablations", "pop,last"], ["--ablations", ""], ["--tail-layers", "0"]])
def test_a_wrong_command_line(arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["model", "--data", str(folder / "data.jsonl"), *arguments])
    assert caught.value.code == 2
    assert f"pop-eval: error: argument {arguments[0]}: " in capsys.readouterr().err
