"""What pop-inspect refuses, and the damage that --check finds in a real engine."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cli_fixtures import WEIGHTS, CliKit, Refusal, change_json
from pop_engine.configs.manifest import FORMAT_VERSION, MANIFEST_NAME
from pop_engine.tools.inspect import main

pytest_plugins = ["cli_plugin"]

MANIFESTS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "absent": (lambda path: path.unlink(), 2, "not an engine directory (it has no engine.json); build one with "),
    "no JSON": (lambda path: path.write_text("engine"), 1, "not a readable manifest ("),
    "no UTF-8": (lambda path: path.write_bytes(b'{"format_version": 1, "dtype": "\xff"}'), 1, "engine.json: "),
    "newer": (lambda path: change_json(path, format_version=FORMAT_VERSION + 1), 1, "upgrade pop-engine"),
    "older": (lambda path: change_json(path, format_version=FORMAT_VERSION - 1), 1, "build the engine again"),
    "boundary": (
        lambda path: change_json(path, boundary="no-pass"),
        1,
        "damaged manifest (Invalid enum value 'no-pass'",
    ),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_manifest(cli_engine: Path, refusal: Refusal, damage: str) -> None:
    inflict, code, message = MANIFESTS[damage]
    inflict(cli_engine / MANIFEST_NAME)
    found = refusal("pop-inspect", cli_engine, "--check")
    assert found[0] == code
    assert found[1].startswith(str(cli_engine))
    assert message in found[1]


@pytest.mark.parametrize("path", ["/no/such/engine", __file__])
def test_path_that_is_no_folder(refusal: Refusal, path: str) -> None:
    message = f"{path}: no such engine directory; build one with `pop-build -m MODEL -o {path}`"
    assert refusal("pop-inspect", path) == (2, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "the following arguments are required: ENGINE"), (["e", "--chekc"], "unrecognized arguments: --chekc")],
)
def test_what_argparse_refuses(usage_refusal: Refusal, arguments: list[str], message: str) -> None:
    assert usage_refusal("pop-inspect", *arguments) == (2, message)


def test_check_of_an_engine_as_it_was_built(cli_kit: CliKit, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(cli_kit.engine), "--check"]) == 0
    assert capsys.readouterr().out.endswith("all 4 files match\n")


@pytest.mark.parametrize("name", ["prefill.onnx", "decode.onnx", "tokenizer.json", f"weights/{WEIGHTS}"])
def test_check_finds_one_changed_byte(cli_engine: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content = bytearray((cli_engine / name).read_bytes())
    content[len(content) // 2] ^= 1
    (cli_engine / name).write_bytes(content)
    assert main([str(cli_engine), "--check"]) == 1
    found = capsys.readouterr().out.splitlines()[-2:]
    assert found[0].startswith(f"{cli_engine / name}: hash differs: sha256 ")
    assert found[1] == "1 of 4 files do not match; build the engine again"
