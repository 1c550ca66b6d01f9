"""Fixtures of the tests of the three commands: the engine is built once, every test works on a copy of its own."""

import shutil
from pathlib import Path

import pytest

from cli_fixtures import COMMANDS, NUM_SLOTS, WEIGHTS, CliKit, RecyclingWorkers, Refusal, one_line, write_checkpoint
from pop_engine.builder import pipeline
from pop_engine.builder.cli import main as pop_build


@pytest.fixture(scope="session")
def cli_kit(tmp_path_factory: pytest.TempPathFactory) -> CliKit:
    root = tmp_path_factory.mktemp("cli")
    kit = CliKit(write_checkpoint(root / "checkpoint"), root / "engine")
    options = ["--weights", "copy", "--max-batch-size", str(NUM_SLOTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "GraphWorkers", RecyclingWorkers)
        assert pop_build(["-m", str(kit.checkpoint), "-o", str(kit.engine), *options]) == 0
    shutil.copyfile(kit.engine / "weights" / WEIGHTS, kit.checkpoint / WEIGHTS)
    return kit


@pytest.fixture
def cli_checkpoint(cli_kit: CliKit, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(cli_kit.checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def cli_engine(cli_kit: CliKit, tmp_path: Path) -> Path:
    """A copy of the engine, to be damaged."""
    return Path(shutil.copytree(cli_kit.engine, tmp_path / "engine"))


@pytest.fixture
def recycled(cli_kit: CliKit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds within this test reuse graphs."""
    monkeypatch.setattr(pipeline, "GraphWorkers", RecyclingWorkers)


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that must fail; returns its exit code and its message: one line, and nothing on stdout."""

    def run(command: str, *arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = COMMANDS[command]([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert out == ""
        return code, one_line(command, err)

    return run


@pytest.fixture
def usage_refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """The same where argparse refuses: it shows the usage, then the message."""

    def run(command: str, *arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            COMMANDS[command]([str(argument) for argument in arguments])
        usage, _, last = capsys.readouterr().err.rstrip("\n").rpartition("\n")
        assert usage.startswith(f"usage: {command}")
        assert isinstance(caught.value.code, int)
        return caught.value.code, one_line(command, last)

    return run
