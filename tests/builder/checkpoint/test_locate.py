"""A mistyped model or folder is told at once: before torch and transformers, which take seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

from pop_engine.builder.checkpoint.locate import HubId, locate_model
from pop_engine.builder.checkpoint.preset import load_preset
from pop_engine.configs.errors import UsageError

COMMANDS = {
    "pop-build": ("pop_engine.builder.cli", ()),
    "pop-calibrate": ("pop_engine.builder.analysis.calibrate_cli", ("--data", "self")),
    "pop-analyze": ("pop_engine.tools.analyze_cli", ("--data", "self")),
}
SCRIPT = """
import sys
from {module} import main

code = main(sys.argv[1:])
assert not {{"torch", "transformers"}} & sys.modules.keys()
sys.exit(code)
"""


def run_without_torch(command: str, *arguments: object) -> tuple[int, str]:
    """Exit code and what went to stderr. An import of torch or transformers is a traceback there."""
    module, text = COMMANDS[command]
    line = [sys.executable, "-c", SCRIPT.format(module=module), *map(str, arguments), *text]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    return result.returncode, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, message = run_without_torch(command, "-m", "/no/checkpoint", "-o", out)
    assert (code, message.count("\n")) == (2, 1)
    assert message.startswith(f"{command}: error: --model /no/checkpoint: no such file or folder; ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_out_that_is_in_use(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    code, message = run_without_torch(command, "-m", "smollm2-135m", "-o", out)
    assert (code, message.count("\n")) == (2, 1)
    assert message.startswith(f"{command}: error: --out {out}: ")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_what_a_name_stands_for(tmp_path: Path) -> None:
    assert locate_model("smollm2-135m", None) == load_preset("smollm2-135m")
    assert locate_model(str(tmp_path), None) == tmp_path
    assert locate_model("org/name", "main") == HubId("org/name")
    with pytest.raises(UsageError, match="--revision main: .* is a local path"):
        locate_model(str(tmp_path), "main")
