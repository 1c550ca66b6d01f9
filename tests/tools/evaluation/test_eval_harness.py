"""lm-evaluation-harness itself over a tiny engine and local tasks, without a network."""

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_kit import SMALL, TinyModels
from pop_engine.tools.evaluation.harness_cli import main
from pop_reference import decode, pop_prefill

POP = (SMALL, SMALL - 1)
HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
TASKS = {
    "local_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
""",
    "local_perplexity": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}]
""",
    "local_generation": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 5, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
DOCUMENTS = [
    {"question": "the cat sat on", "choices": ["the mat", "a hat"], "label": 0},
    {"question": "and then the other", "choices": ["user", "cat ran"], "label": 1},
    {"question": "naïve café", "choices": ["the", "system"], "label": 0},
]


def test_the_model_is_an_entry_point_of_the_harness() -> None:
    """The harness finds it by this name in releases that look for plugins (its docs/plugins.md)."""
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert 'pop_engine = "pop_engine.tools.evaluation.harness:PopEngineLM"' in pyproject
    assert metadata.version("pop-engine")


@pytest.mark.skipif(HAS_HARNESS, reason="the harness is installed")
def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    message = "pop-lm-eval: error: lm_eval is not installed; `pip install 'pop-engine[eval]'` brings it\n"
    assert capsys.readouterr().err == message


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, content in TASKS.items():
        dataset = (
            f"task: {name}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        )
        (folder / f"{name}.yaml").write_text(dataset + content)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_HARNESS, reason="needs `pip install 'pop-engine[eval]'`")
def test_the_harness_runs_local_tasks(tiny: TinyModels, tmp_path: Path) -> None:
    engine, out = tiny.directory(POP, "one-pass"), tmp_path / "out"
    command = [sys.executable, "-m", "pop_engine.tools.evaluation.harness_cli", "run", "--model", "pop_engine"]
    command += ["--model_args", f"engine={engine},threads=1", "--tasks", ",".join(TASKS), "--log_samples"]
    command += ["--include_path", str(write_tasks(tmp_path / "tasks")), "--output_path", str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=offline, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    samples = {name: read_samples(out, name) for name in TASKS}
    loaded = tiny.engine(POP, "one-pass")
    model = tiny.hf_model()
    for document, sample in zip(DOCUMENTS, samples["local_choice"], strict=True):
        for choice, response in zip(document["choices"], sample["filtered_resps"], strict=True):  # type: ignore[call-overload]
            context = loaded.encode(str(document["question"]))
            # The harness puts a space between the two.
            whole = loaded.encode(f"{document['question']} {choice}")
            expected = pop_likelihood(model, context, whole[len(context) :])
            assert float(response[0]) == pytest.approx(expected, abs=1e-3)
    for document, sample in zip(DOCUMENTS, samples["local_perplexity"], strict=True):
        tokens = loaded.encode(str(document["question"]))
        end_token = loaded.manifest.tokenizer.eos_token_ids[0]  # type: ignore[union-attr]
        assert float(sample["filtered_resps"][0]) == pytest.approx(pop_likelihood(model, [end_token], tokens), abs=1e-3)
    assert all(isinstance(sample["filtered_resps"][0], str) for sample in samples["local_generation"])


def read_samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


def pop_likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """By the paper's definition: the context through the pruned model, its last token and the rest through all."""
    first, cache = pop_prefill(model, context, POP[1])
    rows = torch.stack([first, *(decode(model, cache, [token])[-1] for token in continuation[:-1])]).log_softmax(-1)
    return float(rows[range(len(continuation)), continuation].sum())
