"""What a benchmark says about the machine it ran on."""

import subprocess
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from pop_engine.tools import machine as machine_module
from pop_engine.tools.machine import Machine, describe_machine, find_commit


def test_the_machine_is_described_and_goes_through_json() -> None:
    machine = describe_machine()
    assert machine.cpu_model
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 100e6
    assert machine.numpy_version == metadata.version("numpy")
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


def test_commit_is_that_of_the_code_which_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be committed, and this one changed, while a benchmark takes its time."""
    loaded = describe_machine().commit
    monkeypatch.setattr(machine_module, "find_commit", lambda directory: "a later one")
    assert describe_machine().commit == loaded


def test_commit_says_when_the_tree_is_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert find_commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    commit = find_commit(tmp_path)
    assert commit == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "file").write_text("two")
    assert find_commit(tmp_path) == f"{commit}-dirty"
