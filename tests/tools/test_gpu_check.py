"""gpu_check: a dry run on the CPU of all that does not need a GPU, and what it says where there is none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_kit import SMALL, TinyModels, relative_error
from pop_engine.tools.gpu_check import CheckReport, main
from pop_engine.tools.gpu_check_engines import EngineTimes, TtftTime, engine_facts, ratios_to_full
from pop_engine.tools.gpu_check_machine import missing_gpu
from pop_engine.tools.gpu_check_model import PopDecoder, num_decode_weights
from pop_engine.tools.gpu_check_plan import Budget, CheckPlan, OutOfTimeError
from pop_engine.tools.gpu_check_reference import random_model
from pop_engine.tools.spread import Spread
from pop_reference import decode, pop_prefill

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("form", ["one_pass", "two_step"])
def test_the_model_is_pop(form: str) -> None:
    """Against the golden, prefill and a decode step behind it."""
    model = random_model("tiny", "cpu", dtype=torch.float32)
    tokens = [int(token) for token in torch.randint(0, 256, (14,), generator=torch.Generator().manual_seed(1))]
    expected, cache = pop_prefill(model, tokens[:-1], 2)
    with torch.no_grad():
        decoder = PopDecoder(model, 2, 1, len(tokens))
        found = getattr(decoder, form)(torch.tensor([tokens[:-1]]))[0]
        assert relative_error(found.numpy(), expected.numpy()) < 1e-5
        step = decoder.decode(torch.tensor([tokens[-1:]]), len(tokens) - 1)
    assert relative_error(step.numpy(), decode(model, cache, tokens[-1:]).numpy()) < 1e-5


def test_full_prefill_of_a_batch_is_hugging_face() -> None:
    model = random_model("tiny", "cpu", dtype=torch.float32)
    tokens = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = PopDecoder(model, 0, 3, 11).full(tokens)
        expected = model(tokens).logits[:, -1]
    assert relative_error(found.numpy(), expected.numpy()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_models_differ_in_nothing_but_their_dtype(dtype: torch.dtype) -> None:
    model, expected = random_model("tiny", "cpu", dtype=dtype), random_model("tiny", "cpu")
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    for weight, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), other)
    exact = LlamaForCausalLM(model.config).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)


@pytest.mark.parametrize(("tied", "num_weights"), [(False, 96 + 8), (True, 96 + 8)])
def test_weights_of_a_decode_step(tied: bool, num_weights: int) -> None:
    """An LM head of its own is read, an embedding is not; a tied one is both, and read."""
    sizes: dict[str, Any] = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=0, tie_word_embeddings=tied))
    assert num_decode_weights(model) == num_weights


def test_a_dry_run_on_the_cpu(tiny: TinyModels, tmp_path: Path) -> None:
    engine, out = tiny.directory((SMALL, 1), "one-pass"), tmp_path / "check.json"
    given = ["--engine", str(engine), "--checkpoint", str(tiny.checkpoint(SMALL))]

    assert main(["--json", str(out), "--device", "cpu", "--tiny", *given]) == 0

    parts = json.loads(out.read_text(encoding="utf-8"))
    assert {name for name, part in parts.items() if "error" in part} == set()
    assert parts["machine"]["rows"][0]["versions"]["torch"] == torch.__version__
    numbers = parts["reference_numbers"]["rows"][0]
    assert 0 < numbers["one_pass_to_fp32"] < 0.05
    assert [(row["num_tokens"], row["batch_size"]) for row in parts["reference_ttft"]["rows"]] == [
        (8, 1), (32, 1), (8, 2), (32, 2)]  # fmt: skip
    for row in parts["reference_ttft"]["rows"]:
        assert row["ratio"] == pytest.approx(row["full"]["median"] / row["one_pass"]["median"])
        # Equal where this machine reads so fast, for what it computes, that weights cost nothing.
        assert 1 <= row["roofline_bound"] <= row["bound"] * (1 + 1e-9)
    assert [row["batch_size"] for row in parts["reference_decode"]["rows"]] == [1, 2]
    engine_numbers, engine_times = parts["given_engines"]["rows"]
    assert engine_numbers["passed"]
    assert engine_numbers["prefill_error"] < 1e-4
    assert [(row["num_tokens"], row["batch_size"]) for row in engine_times["ttft"]] == [
        (8, 1),
        (8, 2),
        (32, 1),
        (32, 2),
    ]
    assert list(engine_times["decode"]) == ["1", "2"]


def test_numbers_that_differ_do_not_pass(tiny: TinyModels, tmp_path: Path) -> None:
    """The same engine against a checkpoint with one weight changed."""
    out, changed = tmp_path / "check.json", tmp_path / "changed"
    model = tiny.hf_model(SMALL)
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(1.5)
        model.save_pretrained(changed)
        weight.div_(1.5)
    shutil.copy(tiny.checkpoint(SMALL) / "tokenizer.json", changed)
    options = [
        "--device",
        "cpu",
        "--tiny",
        "--minutes",
        "0.01",
        "--engine",
        str(tiny.directory((SMALL, 1), "one-pass")),
    ]

    assert main(["--json", str(out), *options, "--checkpoint", str(changed)]) == 0

    parts = json.loads(out.read_text(encoding="utf-8"))
    assert not parts["given_engines"]["rows"][0]["passed"]
    # No time was given, so what takes some was left out, and said so.
    assert "OutOfTimeError" in parts["reference_ttft"]["error"]


def test_it_runs_from_a_plain_checkout(tmp_path: Path) -> None:
    """With torch and transformers alone: no editable install is seen without `site`, nor is msgspec let in."""
    start = (
        "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.modules['msgspec'] = None; "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    packages, out = str(Path(torch.__file__).parents[1]), tmp_path / "x.json"
    script = [str(ROOT / "tools" / "gpu_check.py"), "--json", str(out), "--device", "cpu", "--tiny"]
    command = [sys.executable, "-I", "-S", "-c", start]
    finished = subprocess.run([*command, packages, *script], capture_output=True, text=True, check=False)

    assert finished.returncode == 0, finished.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))
    assert len(parts["reference_decode"]["rows"]) == 2
    assert {name for name, part in parts.items() if "error" in part} == {"engines"}
    assert "msgspec" in parts["engines"]["error"]


def test_it_says_what_the_driver_says(tmp_path: Path) -> None:
    """No GPU is a message, not a traceback, and takes no packages at all."""
    if missing_gpu() is None:
        pytest.skip("there is a GPU")
    script = ROOT / "tools" / "gpu_check.py"
    command = [sys.executable, "-I", "-S", str(script), "--json", str(tmp_path / "x.json")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)

    assert finished.returncode == 2
    assert finished.stderr.startswith("gpu_check: error: --device cuda: no NVIDIA driver")
    assert len(finished.stderr.splitlines()) == 1


def test_a_part_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    report = CheckReport(tmp_path / "x.json")

    def half() -> Any:
        yield {"first": 1}
        raise RuntimeError("CUDA error")

    report.add("half", half)
    report.add("whole", lambda: [{"second": 2}])

    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {
        "half": {"rows": [{"first": 1}], "error": "RuntimeError: CUDA error"},
        "whole": {"rows": [{"second": 2}]},
    }
    assert (report.num_parts, report.num_failed) == (2, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_budget_ends() -> None:
    with pytest.raises(OutOfTimeError, match="decode: about 5 s, and"):
        Budget(0.01).require(5, "decode")
    Budget(1).require(5, "decode")


def test_the_full_check_has_the_sizes_of_the_paper() -> None:
    plan = CheckPlan("cuda", is_tiny=False, minutes=10)
    assert plan.prompt_lens == (32, 128, 512, 2048, 8192)
    assert plan.batch_sizes == (1, 8)


def test_engines_are_compared_with_the_full_one(tiny: TinyModels) -> None:
    """At the sizes that both were timed at, beside the bound of their plan."""
    full, pop = (engine_facts(tiny.directory((SMALL, tail), "one-pass")) for tail in (0, 1))
    slow = (TtftTime(1, 8, Spread.of([30.0])), TtftTime(1, 16, Spread.of([30.0])), TtftTime(2, 8, Spread.of([50.0])))
    fast = (TtftTime(1, 8, Spread.of([20.0])), TtftTime(1, 32, Spread.of([20.0])), TtftTime(2, 8, Spread.of([25.0])))
    found = ratios_to_full(EngineTimes(full, slow, {}), EngineTimes(pop, fast, {}))
    assert found.engine == pop
    assert [(row.batch_size, row.num_tokens) for row in found.ttft] == [(1, 8), (2, 8)]
    assert [row.ratio for row in found.ttft] == pytest.approx([1.5, 2.0])
    # Of a layer's seven products a pruned one keeps K and V, for all rows but the last.
    assert all(1 < row.bound < SMALL / (SMALL - 1) for row in found.ttft)
