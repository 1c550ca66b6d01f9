"""Where pop-build may not or cannot write: what it says, and that it leaves everything as it was."""

import os
from pathlib import Path

import pytest

from cli_fixtures import CliKit, Refusal, leftovers, mounted
from pop_engine.builder.staging import staging_directory
from pop_engine.configs.manifest import MANIFEST_NAME

pytest_plugins = ["cli_plugin"]
NOBODY = 65534


def test_folder_in_use(refusal: Refusal, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    message = f"--out {out}: is in use and holds no engine; choose an empty or a new folder"
    for force in ([], ["--force"]):
        assert refusal("pop-build", "-m", "smollm2-135m", "-o", out, *force) == (2, message)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert leftovers(out) == []


def test_file(refusal: Refusal, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    message = f"--out {out}: is a file; choose another folder"
    assert refusal("pop-build", "-m", "smollm2-135m", "-o", out) == (2, message)
    assert out.read_text() == "mine"


def test_engine_that_is_there_already(refusal: Refusal, cli_engine: Path) -> None:
    before = (cli_engine / MANIFEST_NAME).read_bytes()
    message = f"--out {cli_engine}: holds an engine already; add --force to replace it, or choose another folder"
    assert refusal("pop-build", "-m", "smollm2-135m", "-o", cli_engine) == (2, message)
    assert (cli_engine / MANIFEST_NAME).read_bytes() == before


def test_path_below_a_file(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    code, message = refusal("pop-build", "-m", "smollm2-135m", "-o", tmp_path / "file" / "out")
    assert code == 1
    assert message == f"{tmp_path / 'file'}: File exists; it is in the way; choose another folder"
    code, message = refusal("pop-build", "-m", "smollm2-135m", "-o", tmp_path / "file" / "deep" / "out")
    assert code == 1
    assert message == f"{tmp_path / 'file' / 'deep'}: Not a directory; a file is in the way; choose another folder"


def test_refused_build_leaves_no_folders(refusal: Refusal, tmp_path: Path) -> None:
    """Of the folders above --out, a build that fails removes those it made, and no others."""
    (tmp_path / "there").mkdir()
    out = tmp_path / "there" / "new" / "newer" / "out"
    code, message = refusal("pop-build", "-m", "smollm2-136m", "-o", out)
    assert code == 2
    assert "smollm2-136m" in message
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_folders_that_came_into_use_stay(tmp_path: Path) -> None:
    notes = tmp_path / "shared" / "notes.txt"
    with staging_directory(tmp_path / "shared" / "new" / "out", force=False):
        notes.write_text("mine")
    assert sorted(tmp_path.rglob("*")) == [notes.parent, notes]


def test_another_build_is_at_it(refusal: Refusal, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staging_directory(out, force=False) as staging:
        message = f"--out {out}: another build is writing there; wait for it, or choose another folder"
        assert refusal("pop-build", "-m", "smollm2-135m", "-o", out) == (2, message)
        assert staging.is_dir()
    assert leftovers(out) == []


def test_read_only_file_system(refusal: Refusal, tmp_path: Path) -> None:
    with mounted(tmp_path / "mount", "ro,size=64k") as mount:
        code, message = refusal("pop-build", "-m", "smollm2-135m", "-o", mount / "out")
    assert code == 1
    assert message.endswith(": Read-only file system; the file system is read-only; choose another folder")


def test_folder_of_another_user(refusal: Refusal, tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not write")
    folder = tmp_path_factory.mktemp("root")
    os.seteuid(NOBODY)
    try:
        code, message = refusal("pop-build", "-m", "smollm2-135m", "-o", folder / "out")
    finally:
        os.seteuid(0)
    assert code == 1
    assert message.endswith(": Permission denied; choose a folder you may write to, or change its permissions")
    assert list(folder.iterdir()) == []


# The weights take 130 kB and the first graph 250 kB: the disk is full in the middle of either.
@pytest.mark.usefixtures("recycled")
@pytest.mark.parametrize("size", ["64k", "256k"])
def test_disk_is_full(refusal: Refusal, tmp_path: Path, cli_kit: CliKit, size: str) -> None:
    with mounted(tmp_path / "mount", f"size={size}") as mount:
        options = ["--weights", "copy", "--max-batch-size", "2", "--no-verify"]
        code, message = refusal("pop-build", "-m", cli_kit.checkpoint, "-o", mount / "out", *options)
        assert code == 1
        assert "No space left on device; free some space or choose another folder" in message
        assert list(mount.iterdir()) == []
