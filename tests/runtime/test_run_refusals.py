"""What pop-run refuses: each bad input with its one line and its exit code."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest

from cli_fixtures import MAX_SEQ_LEN, WEIGHTS, CliKit, Refusal, change_json, in_process_of_its_own, one_line
from pop_engine.configs.manifest import FORMAT_VERSION, MANIFEST_NAME, Manifest, record_file

pytest_plugins = ["cli_plugin"]


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("hello")
    return path


def edit_manifest(engine: Path, **values: object) -> None:
    change_json(engine / MANIFEST_NAME, **values)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def refer_to_moved_weights(engine: Path) -> None:
    manifest = Manifest.load(engine)
    assert manifest.weights is not None
    files = tuple(replace(file, path=f"/moved/away/{WEIGHTS}") for file in manifest.weights.files)
    weights = replace(manifest.weights, mode="reference", directory="/moved/away", files=files)
    replace(manifest, weights=weights).save(engine / MANIFEST_NAME)


def put_garbage_for_graph(engine: Path) -> None:
    """A graph that the manifest vouches for, and that is none."""
    (engine / "prefill.onnx").write_bytes(b"no graph")
    manifest = Manifest.load(engine)
    files = tuple(record_file(engine / file.path, file.path) for file in manifest.files)
    replace(manifest, files=files).save(engine / MANIFEST_NAME)


def put_nan_into_weights(engine: Path) -> None:
    path = engine / "weights" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4096] + b"\xff" * 4096)


DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no manifest": (
        lambda e: (e / MANIFEST_NAME).unlink(),
        2,
        "{e}: not an engine directory (it has no engine.json); ",
    ),
    "newer format": (
        lambda e: edit_manifest(e, format_version=FORMAT_VERSION + 1),
        1,
        f"{{e}}/engine.json: format version {FORMAT_VERSION + 1}, but this version reads {FORMAT_VERSION}; "
        "upgrade pop-engine",
    ),
    "older format": (
        lambda e: edit_manifest(e, format_version=FORMAT_VERSION - 1),
        1,
        f"{{e}}/engine.json: format version {FORMAT_VERSION - 1}, but this version reads {FORMAT_VERSION}; "
        "build the engine again",
    ),
    "cut manifest": (lambda e: truncate(e / MANIFEST_NAME), 1, "{e}/engine.json: not a readable manifest ("),
    "empty manifest": (lambda e: (e / MANIFEST_NAME).write_bytes(b""), 1, "{e}/engine.json: not a readable manifest ("),
    "manifest without dims": (
        lambda e: edit_manifest(e, dims=None),
        1,
        "{e}/engine.json: damaged manifest (Expected `object`, got `null` - at `$.dims`); build the engine again",
    ),
    "impossible plan": (
        lambda e: edit_manifest(e, plan={"num_hidden_layers": 3, "num_tail_layers": 3}),
        1,
        "{e}/engine.json: damaged manifest (",
    ),
    "changed graph": (
        lambda e: (e / "decode.onnx").write_bytes((e / "decode.onnx").read_bytes()[:-1] + b"\x00"),
        1,
        "{e}/decode.onnx: changed since it was built (its SHA-256 differs); build the engine again",
    ),
    "cut graph": (lambda e: truncate(e / "prefill.onnx"), 1, "{e}/prefill.onnx: "),
    "missing graph": (
        lambda e: (e / "prefill.onnx").unlink(),
        1,
        "{e}/prefill.onnx: missing; build the engine again",
    ),
    "cut weights": (lambda e: truncate(e / "weights" / WEIGHTS), 1, "{e}/weights/model.safetensors: "),
    "missing weights": (
        lambda e: (e / "weights" / WEIGHTS).unlink(),
        1,
        "{e}/weights/model.safetensors: missing; build the engine again",
    ),
    "moved weights": (
        refer_to_moved_weights,
        1,
        "/moved/away/model.safetensors: missing; the checkpoint it refers to has moved: put it back or build again",
    ),
    "no weights": (
        lambda e: edit_manifest(e, weights=None),
        2,
        "{e}: built with --no-weights, so it cannot run; build it without that option",
    ),
    "another dtype": (
        lambda e: edit_manifest(e, cache=json.loads((e / MANIFEST_NAME).read_text())["cache"] | {"dtype": "fp16"}),
        1,
        "{e}: dtype fp16: ort-cpu runs fp32; build it for that",
    ),
    "unknown target": (
        lambda e: edit_manifest(e, target={"name": "abacus", "versions": {}, "decode_with": "decode"}),
        1,
        "{e}/engine.json: damaged manifest (",
    ),
    "graph that is none": (put_garbage_for_graph, 1, "{e}/prefill.onnx: ONNX Runtime "),
    "NaN in the weights": (put_nan_into_weights, 1, "logits: nan for token "),
    "no tokenizer": (
        lambda e: edit_manifest(e, tokenizer=None),
        2,
        "the engine has no tokenizer: give token ids instead of text",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_engine_that_cannot_run(cli_engine: Path, prompt: Path, refusal: Refusal, damage: str) -> None:
    inflict, code, message = DAMAGES[damage]
    inflict(cli_engine)
    found = refusal("pop-run", cli_engine, prompt, "--json")
    assert found[0] == code
    assert found[1].startswith(message.format(e=cli_engine))


@pytest.mark.parametrize("name", ["absent", "prompt.txt"])
def test_engine_that_is_no_folder(prompt: Path, refusal: Refusal, name: str) -> None:
    path = prompt.parent / name
    message = f"{path}: no such engine directory; build one with `pop-build -m MODEL -o {path}`"
    assert refusal("pop-run", path, prompt) == (2, message)


def test_target_that_the_installed_packages_do_not_run(cli_engine: Path, prompt: Path, refusal: Refusal) -> None:
    edit_manifest(cli_engine, target={"name": "ort-cuda", "versions": {}, "decode_with": "decode"})
    code, message = refusal("pop-run", cli_engine, prompt)
    assert code == 1
    assert message == (
        f"target ort-cuda: the onnxruntime {ort.__version__} here has no CUDAExecutionProvider; "
        "`pip uninstall -y onnxruntime; pip install --force-reinstall 'onnxruntime-gpu>=1.31,<2'`"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty prompt; expected some text"),
        (b" \n\t ", "empty prompt; expected some text"),
        (b"caf\xe9 au lait", "byte 3 (0xe9) is not UTF-8; save the file as UTF-8"),
    ],
)
def test_prompt_file(cli_kit: CliKit, prompt: Path, refusal: Refusal, content: bytes, message: str) -> None:
    prompt.write_bytes(content)
    assert refusal("pop-run", cli_kit.engine, prompt) == (2, f"{prompt}: {message}")


def test_prompt_from_stdin(cli_kit: CliKit, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    message = "stdin: byte 0 (0xff) is not UTF-8; save the file as UTF-8"
    assert refusal("pop-run", cli_kit.engine, "-") == (2, message)


def test_prompt_that_is_no_file(cli_kit: CliKit, tmp_path: Path, refusal: Refusal) -> None:
    end = "; give a text file, or - for stdin"
    absent = refusal("pop-run", cli_kit.engine, tmp_path / "absent.txt")
    assert absent == (2, f"{tmp_path / 'absent.txt'}: cannot be read (No such file or directory){end}")
    assert refusal("pop-run", cli_kit.engine, tmp_path) == (2, f"{tmp_path}: cannot be read (Is a directory){end}")


def test_prompt_that_is_too_long(cli_kit: CliKit, prompt: Path, refusal: Refusal) -> None:
    prompt.write_text("x" * (MAX_SEQ_LEN + 1))
    code, message = refusal("pop-run", cli_kit.engine, prompt, "--no-chat")
    assert code == 2
    assert message == (
        f"prompt of {MAX_SEQ_LEN + 1} tokens: the engine holds max_seq_len {MAX_SEQ_LEN}; "
        "shorten it, or build with a higher --max-seq-len"
    )


TEXT_ONLY = "images: this model takes text only, as plain strings; leave them out, or build a vision-language model"
FLAGS: list[tuple[list[str], str]] = [
    (["--temperature", "-1"], "temperature -1.0: expected a number from 0 to 100"),
    (["--temperature", "nan"], "temperature nan: expected a number from 0 to 100"),
    (["--temperature", "101"], "temperature 101.0: expected a number from 0 to 100"),
    (["--top-p", "0"], "top_p 0: expected a number above 0 and up to 1; for greedy use temperature 0"),
    (["--top-p", "1.5"], "top_p 1.5: expected a number from 0 to 1"),
    (["--top-k", "-1"], "top_k -1: expected a whole number of at least 0"),
    (["--min-p", "2"], "min_p 2.0: expected a number from 0 to 1"),
    (["--repetition-penalty", "0"], "repetition_penalty 0.0: expected a number from 0.01 to 100"),
    (["--seed", "-1"], "seed -1: expected a whole number of at least 0"),
    (["--max-tokens", "0"], "max_tokens 0: expected a whole number of at least 1"),
    (["--logprobs", "-1", "--json"], "logprobs -1: expected a whole number of at least 0"),
    (["--stop", ""], "stop ('',): expected a tuple of strings, none of them empty"),
    (["--threads", "0"], "threads 0: expected a whole number of at least 1, or none for all cores"),
    (["--logprobs", "2"], "--logprobs: only shown with --json; add it"),
    (["--batch", "b.jsonl"], "give either a prompt (PROMPT.txt or -) or --batch FILE.jsonl"),
    (["--image", "a.png"], TEXT_ONLY),
    (["--image", "a.png", "--no-chat"], TEXT_ONLY),
    (["--video", "frames"], TEXT_ONLY),
    (["--video", "frames", "--frame-rate", "-1"], "video frames: frame rate -1.0: expected a number above 0"),
    (
        ["--system", "Be brief.", "--no-chat"],
        "--system 'Be brief.': --no-chat is given; put the text into the prompt instead",
    ),
]


@pytest.mark.parametrize(("flags", "message"), FLAGS)
def test_flags(cli_kit: CliKit, prompt: Path, refusal: Refusal, flags: list[str], message: str) -> None:
    assert refusal("pop-run", cli_kit.engine, prompt, *flags) == (2, message)


def test_system_message_without_a_template(cli_engine: Path, prompt: Path, refusal: Refusal) -> None:
    tokenizer = json.loads((cli_engine / MANIFEST_NAME).read_text())["tokenizer"]
    edit_manifest(cli_engine, tokenizer=tokenizer | {"chat_template": None})
    code, message = refusal("pop-run", cli_engine, prompt, "--system", "s")
    assert (code, message) == (2, "--system 's': the model has no chat template; put the text into the prompt instead")


def test_image_beside_a_batch(cli_kit: CliKit, refusal: Refusal) -> None:
    message = '--image, --video: not with --batch; write "images" into its lines'
    assert refusal("pop-run", cli_kit.engine, "--batch", "b.jsonl", "--image", "a.png") == (2, message)


def test_neither_prompt_nor_batch(cli_kit: CliKit, refusal: Refusal) -> None:
    message = "give either a prompt (PROMPT.txt or -) or --batch FILE.jsonl"
    assert refusal("pop-run", cli_kit.engine) == (2, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: ENGINE"),
        (["e", "p", "--temperature", "warm"], "argument --temperature: invalid float value: 'warm'"),
        (["e", "p", "--max-tokens", "1.5"], "argument --max-tokens: invalid int value: '1.5'"),
        (["e", "p", "--top", "1"], "unrecognized arguments: --top 1"),
    ],
)
def test_what_argparse_refuses(usage_refusal: Refusal, arguments: list[str], message: str) -> None:
    assert usage_refusal("pop-run", *arguments) == (2, message)


GOOD_LINE = b'{"prompt": "a"}\n'
LINES: list[tuple[bytes, str]] = [
    (b"\n \n", ': empty; expected lines such as {"prompt": "…"}'),
    (GOOD_LINE + b"{", ", line 2: not a JSON object ("),
    (b"[1]", ", line 1: not a JSON object ("),
    (b'\n{"prompt": "a", "temprature": 1}', ", line 2: unknown key 'temprature'; expected some of prompt, system, "),
    (b"{}", ", line 1: expected a non-empty text as prompt, found None"),
    (b'{"prompt": " "}', ", line 1: expected a non-empty text as prompt, found ' '"),
    (b'{"prompt": 5}', ", line 1: expected a non-empty text as prompt, found 5"),
    (b'{"prompt": "a", "images": "b"}', ", line 1: expected a list of paths or data: URLs as images, found 'b'"),
    (b'{"prompt": "a", "system": 5}', ", line 1: expected a text as system, found 5"),
    (b'{"prompt": "a", "max_tokens": 0}', ", line 1: max_tokens 0: expected a whole number of at least 1"),
    (b'{"prompt": "a", "temperature": "hot"}', ", line 1: Expected `float`, got `str` - at `$.temperature`"),
    (b'{"prompt": "a", "stop": "b"}', ", line 1: Expected `array`, got `str` - at `$.stop`"),
    (GOOD_LINE + b'{"prompt": "\xff"}', ": byte 28 (0xff) is not UTF-8; save the file as UTF-8"),
]


@pytest.mark.parametrize(("content", "message"), LINES)
def test_batch_file(cli_kit: CliKit, tmp_path: Path, refusal: Refusal, content: bytes, message: str) -> None:
    batch = tmp_path / "batch.jsonl"
    batch.write_bytes(content)
    code, found = refusal("pop-run", cli_kit.engine, "--batch", batch)
    assert code == 2
    assert found.startswith(f"--batch {batch}{message}")


def test_batch_file_that_is_absent(cli_kit: CliKit, refusal: Refusal) -> None:
    message = "--batch /no/batch.jsonl: cannot be read (No such file or directory)"
    assert refusal("pop-run", cli_kit.engine, "--batch", "/no/batch.jsonl") == (2, message)


def test_nothing_but_the_line_comes_out_of_the_process(cli_engine: Path, prompt: Path) -> None:
    """Not even what ONNX Runtime would write past Python."""
    put_garbage_for_graph(cli_engine)
    result = in_process_of_its_own("pop-run", cli_engine, prompt)
    assert (result.returncode, result.stdout) == (1, "")
    assert one_line("pop-run", result.stderr).startswith(f"{cli_engine / 'prefill.onnx'}: ONNX Runtime ")
