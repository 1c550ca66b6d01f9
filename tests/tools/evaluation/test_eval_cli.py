"""pop-eval end to end on tiny engines: its figures against Hugging Face and the reference of the method in fp32."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine_kit import SMALL, TinyModels
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.evaluation.cli import main
from pop_engine.tools.evaluation.result import EvalResult
from pop_engine.tools.evaluation.text import EvalText
from pop_reference import decode, greedy, pop_prefill

FULL, POP = (SMALL, 0), (SMALL, SMALL - 1)
MAX_TOKENS = 6
LINES: list[dict[str, str]] = [
    {"prompt": "the cat sat on", "answer": " the mat"},
    {"prompt": "user <b>&amp; assistant", "answer": "naïve"},
    {"text": "the cat sat on the mat and then the other cat ran to the hat"},
    {"prompt": "then the other"},
    {"prompt": "hat hat hat mat", "answer": " the cat ran"},
]


@pytest.fixture(scope="module")
def engines(tiny: TinyModels) -> tuple[Path, Path]:
    return tiny.directory(POP, "one-pass"), tiny.directory(FULL, "one-pass")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


@pytest.fixture(scope="module")
def run(engines: tuple[Path, Path], data: Path) -> tuple[int, EvalResult, str]:
    """One run of the command: its exit code, its JSON and its page."""
    json_file, html_file = data.with_name("out.json"), data.with_name("out.html")
    arguments = [str(engines[0]), "--against", str(engines[1]), "--data", str(data), "--max-tokens", str(MAX_TOKENS)]
    code = main([*arguments, "--no-chat", "--threads", "1", "--json", str(json_file), "--html", str(html_file)])
    return code, msgspec.json.decode(json_file.read_bytes(), type=EvalResult), html_file.read_text()


def answer_logprobs(model: Any, num_tail_layers: int, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """log p at each answer token by the paper's definition, [len(answer), vocab]; a tail of 0 is the full model."""
    first, cache = pop_prefill(model, prompt, num_tail_layers)
    rows = [first, *(decode(model, cache, [token])[-1] for token in answer[:-1])]
    return torch.stack(rows).double().log_softmax(-1)


def nll(logprobs: torch.Tensor, answer: list[int]) -> float:
    return -float(logprobs[range(len(answer)), answer].mean())


def hf_nll(model: Any, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        rows = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(rows, torch.tensor(answer)))


@pytest.mark.usefixtures("one_torch_thread")
def test_every_score_is_that_of_the_reference(
    run: tuple[int, EvalResult, str], tiny: TinyModels, engines: tuple[Path, Path]
) -> None:
    code, result, _ = run
    assert code == 0
    model, text = tiny.hf_model(), EvalText(engines[1], Manifest.load(engines[1]).tokenizer)
    expected_benefit = [0.0, 0.0]
    for document, line in zip(result.documents, LINES, strict=True):
        prompt, answer = split(line, model, text)
        full, pop = (answer_logprobs(model, plan[1], prompt, answer) for plan in (FULL, POP))
        assert document.nll_full == pytest.approx(hf_nll(model, prompt, answer), abs=1e-4)
        assert document.nll_pop == pytest.approx(nll(pop, answer), abs=1e-4)
        assert document.nll_none == pytest.approx(hf_nll(model, prompt[-1:], answer), abs=1e-4)
        kl = torch.nn.functional.kl_div(pop, full, log_target=True, reduction="none").sum(-1).mean()
        assert document.kl == pytest.approx(float(kl), abs=1e-4)
        same = (pop.argmax(-1) == full.argmax(-1)).tolist()
        assert document.top1_agreement == sum(same) / len(same)
        assert document.first_token_agrees == same[0]
        expected_benefit[0] += hf_nll(model, prompt[-1:], answer) - nll(pop, answer)
        expected_benefit[1] += hf_nll(model, prompt[-1:], answer) - hf_nll(model, prompt, answer)
        answers = [greedy(model, prompt, plan[1], MAX_TOKENS) for plan in (FULL, POP)]
        assert document.greedy_matches == (answers[0] == answers[1])
        assert document.answer_pop == text.decode(answers[1])
    assert (result.scores.benefit is None) == (expected_benefit[1] <= 0)
    if result.scores.benefit is not None:
        assert result.scores.benefit.value == pytest.approx(expected_benefit[0] / expected_benefit[1], abs=1e-3)


def split(line: dict[str, str], model: Any, text: EvalText) -> tuple[list[int], list[int]]:
    """Prompt and answer of a line, by the rules that --help and the README state."""
    if "text" in line:
        tokens = text.encode(line["text"])
        end = len(tokens) - min(MAX_TOKENS, len(tokens) // 4)
        return tokens[:end], tokens[end : end + MAX_TOKENS]
    prompt = text.encode(line["prompt"])
    if "answer" in line:
        return prompt, text.encode(line["answer"])[:MAX_TOKENS]
    return prompt, greedy(model, prompt, 0, MAX_TOKENS)


def test_times_and_circumstances_stand_beside_the_scores(run: tuple[int, EvalResult, str]) -> None:
    _, result, _ = run
    assert all(document.ttft_full_ms > 0 < document.ttft_pop_ms for document in result.documents)
    assert result.scores.ttft_ratio.value == pytest.approx(
        sum(document.ttft_full_ms for document in result.documents)
        / sum(document.ttft_pop_ms for document in result.documents)
    )
    assert (result.pop.num_tail_layers, result.full.num_tail_layers) == (POP[1], 0)
    assert result.pop.peak_memory_bytes > 1_000_000
    assert result.machine.onnxruntime_version is not None
    assert (result.setting.data, len(result.setting.data_sha256)) == ("data.jsonl", 64)
    assert [loss.position for loss in result.positions] == list(range(MAX_TOKENS))


def test_the_json_has_the_shape_that_its_schema_says(run: tuple[int, EvalResult, str]) -> None:
    schema = msgspec.json.schema(EvalResult)
    written = json.loads(msgspec.json.encode(run[1]))
    definitions = schema["$defs"]
    assert set(definitions["EvalResult"]["required"]) == set(written)
    assert set(definitions["Scores"]["required"]) == set(written["scores"])
    assert set(definitions["DocumentScore"]["required"]) == set(written["documents"][0])
    assert all(set(written["scores"][name]) == {"value", "standard_error"} for name in ("kl", "nll_pop", "ttft_ratio"))


def test_the_page_holds_the_numbers_of_the_json(run: tuple[int, EvalResult, str]) -> None:
    _, result, page = run
    scores = result.scores
    for estimate in (scores.nll_full, scores.nll_pop, scores.nll_none, scores.kl):
        assert f'<td class="number">{estimate.value:.4f} ± {estimate.standard_error:.4f}</td>' in page
    for document in result.documents:
        assert f'<td class="number">{document.nll_pop:.4f}</td>' in page


REFUSALS: list[tuple[list[str], str]] = [
    (["ENGINE"], "--against: missing; give the full engine"),
    (["ENGINE", "--against", "ENGINE", "--max-tokens", "6"], "has 3 tail layers; expected a full engine"),
    (["/no/engine", "--against", "FULL"], "/no/engine: no such engine directory"),
    (["ENGINE", "--against", "FULL", "--max-loss", "101"], "--max-loss 101: expected a percentage from 0 to 100"),
    (["ENGINE", "--against", "FULL", "--json", "/no/folder/x"], "--json /no/folder/x: the folder /no/folder does not"),
    (["ENGINE", "--against", "FULL", "--html", "/tmp"], "--html /tmp: is a folder"),
    (["ENGINE", "--against", "FULL", "--max-tokens", "48"], "line 1: 14 prompt tokens and 48 of the answer"),
    (["ENGINE", "--against", "FULL", "--calibrate", "self"], "--calibrate: only used with --sweep"),
    (["ENGINE", "--sweep", "0,1"], "is an engine; --sweep builds engines itself"),
    (["model", "--sweep", "1", "--calibrate-tokens", "9"], "--calibrate-tokens: only used with --calibrate"),
    (["model", "--sweep", "1", "--calibrate", "/no/text"], "--calibrate /no/text: no such file"),
    (["model", "--sweep", "1", "--calibrate", "DATA"], "is the text to be scored, which would flatter it"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_refusals_are_one_line(
    arguments: list[str],
    message: str,
    engines: tuple[Path, Path],
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"ENGINE": str(engines[0]), "FULL": str(engines[1]), "DATA": str(data)}
    code = main([*(names.get(argument, argument) for argument in arguments), "--data", str(data)])
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1), captured.err
    assert captured.err.startswith("pop-eval: error: ")
    assert message in captured.err


@pytest.mark.parametrize(
    "arguments", [["--max-tokens", "0"], ["--limit", "x"], ["--sweep", "1,-2"], ["--sweep", ""], ["--context-len", "²"]]
)
def test_a_wrong_command_line(arguments: list[str], data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["engine", "--against", "full", "--data", str(data), *arguments])
    assert caught.value.code == 2
    assert f"pop-eval: error: argument {arguments[0]}" in capsys.readouterr().err
