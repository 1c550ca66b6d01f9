"""pop-run as its users call it: text, JSON, batches, pipes."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_fixtures import CliKit, in_process_of_its_own
from pop_engine.runtime import Engine, SamplingParams
from pop_engine.runtime.cli import main

pytest_plugins = ["cli_plugin"]
MODULES = {"pop-build": "builder.cli", "pop-run": "runtime.cli", "pop-inspect": "tools.inspect"}


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("hello", encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, str]:
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    return out, err


def generated(kit: CliKit, text: str, *, chat: bool, **params: object) -> str:
    with Engine.load(kit.engine) as engine:
        settings = SamplingParams(**params)  # type: ignore[arg-type]
        if chat:
            return engine.chat([{"role": "user", "content": text}], settings).text
        return engine.generate(text, settings).text


def test_text_is_what_the_api_gives(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, cli_kit.engine, prompt, "--max-tokens", "20")
    assert out == generated(cli_kit, "hello", chat=True, max_tokens=20)
    assert err == ""
    plain, _ = run(capsys, cli_kit.engine, prompt, "--max-tokens", "20", "--no-chat")
    assert plain == generated(cli_kit, "hello", chat=False, max_tokens=20)
    assert plain != out


def test_system_message_changes_the_answer(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = json.loads(run(capsys, cli_kit.engine, prompt, "--max-tokens", "1", "--json")[0])
    with_system = json.loads(
        run(capsys, cli_kit.engine, prompt, "--max-tokens", "1", "--json", "--system", "Be brief.")[0]
    )
    longer = with_system["metrics"]["num_prompt_tokens"] - base["metrics"]["num_prompt_tokens"]
    assert longer == len("s:Be brief.\n")


def test_json(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, cli_kit.engine, prompt, "--max-tokens", "5", "--json", "--logprobs", "2", "--ignore-eos")
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result.keys() == {
        "text", "token_ids", "finish_reason", "metrics", "logprobs", "load_ms", "peak_memory_bytes"
    }  # fmt: skip
    assert result["metrics"].keys() == {"num_prompt_tokens", "num_output_tokens", "ttft_ms", "tpot_ms"}
    assert result["metrics"]["num_prompt_tokens"] == len("u:hello\na:")
    assert (result["metrics"]["num_output_tokens"], result["finish_reason"]) == (5, "length")
    assert len(result["token_ids"]) == 5
    for token_id, entry in zip(result["token_ids"], result["logprobs"], strict=True):
        assert entry["token_id"] == token_id == entry["top_logprobs"][0][0]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
    assert result["peak_memory_bytes"] > 10e6


def test_stats(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, cli_kit.engine, prompt, "--max-tokens", "4", "--ignore-eos", "--stats")
    assert out == generated(cli_kit, "hello", chat=True, max_tokens=4, ignore_eos=True)
    assert err.count("\n") == 1
    assert err.startswith("10 prompt tokens, first token after ")
    assert "; 4 tokens, " in err
    assert err.endswith(" MB at the peak\n")


def test_a_seed_samples_the_same_text(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "20", "--temperature", "1.5", "--seed"]
    first, again, other = (run(capsys, cli_kit.engine, prompt, *flags, seed)[0] for seed in ("7", "7", "8"))
    assert first == again
    assert first != other


def test_stop_never_leaks(cli_kit: CliKit, prompt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated(cli_kit, "hello", chat=False, max_tokens=20, ignore_eos=True)
    flags = ["--no-chat", "--max-tokens", "20", "--ignore-eos"]
    for start in range(2, len(whole) - 3):
        stop = whole[start : start + 3]
        out, _ = run(capsys, cli_kit.engine, prompt, *flags, "--stop", "never there", "--stop", stop)
        assert out == whole[: whole.index(stop)]


def test_batch_gives_every_line_its_own_answer(
    cli_kit: CliKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More lines than slots, blank lines between, settings of their own."""
    lines = [{"prompt": f"prompt number {n}", "max_tokens": n + 1} for n in range(5)] + [{"prompt": "é"}]
    batch = tmp_path / "batch.jsonl"
    batch.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    out, err = run(capsys, cli_kit.engine, "--batch", batch, "--ignore-eos", "--max-tokens", "3", "--stats")
    results = sorted((json.loads(line) for line in out.splitlines()), key=lambda result: int(result["index"]))
    assert [result["index"] for result in results] == list(range(6))
    assert [len(result["token_ids"]) for result in results] == [1, 2, 3, 4, 5, 3]
    for line, result in zip(lines, results, strict=True):
        limit = line.get("max_tokens", 3)
        text = generated(cli_kit, str(line["prompt"]), chat=True, max_tokens=limit, ignore_eos=True)
        assert result["text"] == text
    assert err.startswith("6 prompts, 18 tokens in ")


def test_batch_line_with_stop_and_system(cli_kit: CliKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = tmp_path / "batch.jsonl"
    batch.write_text('{"prompt": "a", "system": "s", "stop": ["b", "c"], "logprobs": 0}\n')
    result = json.loads(run(capsys, cli_kit.engine, "--batch", batch, "--max-tokens", "2")[0])
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert result["metrics"]["num_prompt_tokens"] == len("s:s\nu:a\na:")


def test_prompt_from_stdin(
    cli_kit: CliKit, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("grüße".encode())))
    out, _ = run(capsys, cli_kit.engine, "-", "--max-tokens", "5")
    assert out == generated(cli_kit, "grüße", chat=True, max_tokens=5)


def test_in_a_pipe_with_an_ascii_locale(cli_kit: CliKit, prompt: Path) -> None:
    command = [sys.executable, "-m", "pop_engine.runtime.cli", str(cli_kit.engine), "-", "--max-tokens", "20"]
    environment = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, input=b"hello", capture_output=True, check=True, env=environment)
    assert result.stdout.decode("utf-8") == generated(cli_kit, "hello", chat=True, max_tokens=20)
    assert result.stderr == b""


@pytest.mark.parametrize("flags", [[], ["--json"], ["--stats"]])
def test_closed_pipe_ends_it_quietly(cli_kit: CliKit, prompt: Path, flags: list[str]) -> None:
    """As in `pop-run … | head -c 5`, once head has had enough."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pop_engine.runtime.cli", str(cli_kit.engine), str(prompt), *flags]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, b"")


def test_full_device_is_said_in_one_line(cli_kit: CliKit, prompt: Path) -> None:
    command = [sys.executable, "-m", "pop_engine.runtime.cli", str(cli_kit.engine), str(prompt)]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "pop-run: error: No space left on device; free some space or choose another folder\n"
    assert (result.returncode, result.stderr) == (1, message)


@pytest.mark.parametrize("command", MODULES)
def test_help_imports_nothing_heavy(command: str) -> None:
    code = (
        f"import sys; from pop_engine.{MODULES[command]} import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'numpy', 'jinja2', 'rich'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: {command}")


def test_running_imports_neither_torch_nor_transformers(cli_kit: CliKit, prompt: Path) -> None:
    code = (
        "import sys; from pop_engine.runtime.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'onnx', 'safetensors'} & sys.modules.keys();"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    command = [sys.executable, "-c", code, str(cli_kit.engine), str(prompt), "--max-tokens", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_command_and_module_are_the_same(cli_kit: CliKit, prompt: Path) -> None:
    result = in_process_of_its_own("pop-run", cli_kit.engine, prompt, "--max-tokens", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == generated(cli_kit, "hello", chat=True, max_tokens=3)
