"""However a build ends, nothing that looks like an engine is left, and the next build removes the rest."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cli_fixtures import CliKit, leftovers
from pop_engine.builder import pipeline
from pop_engine.builder.cli import main
from pop_engine.builder.staging import publish, staging_directory
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import MANIFEST_NAME, Manifest

pytest_plugins = ["cli_plugin"]
_GIVE_UP_S = 300

# A build as far as staging is concerned, which kills itself at a named moment.
BUILD = """
import os, signal, sys
from pathlib import Path
from pop_engine.builder.staging import publish, staging_directory

out, moment = Path(sys.argv[1]), sys.argv[2]

def reach(name):
    if name == moment:
        os.kill(os.getpid(), signal.SIGKILL)

rename = Path.rename
def watched(path, target):
    renamed = rename(path, target)
    reach("moved aside" if str(target).endswith("-old") else "renamed")
    return renamed
Path.rename = watched

with staging_directory(out, force=True) as staging:
    reach("empty")
    (staging / "prefill.onnx").write_text("half")
    reach("half")
    (staging / "engine.json").write_text("new")
    reach("whole")
    publish(staging, out)
    reach("published")
"""


def put_engine(out: Path, content: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST_NAME).write_text(content)


def build_by_hand(
    out: Path, content: str, *, force: bool = False, before_publishing: Callable[[Path], object] = bool
) -> None:
    with staging_directory(out, force=force) as staging:
        put_engine(staging, content)
        before_publishing(staging)
        publish(staging, out)


@pytest.mark.parametrize("moment", ["empty", "half", "whole", "renamed", "published"])
def test_killed_while_there_is_no_engine_yet(tmp_path: Path, moment: str) -> None:
    out = tmp_path / "engine"
    killed = subprocess.run([sys.executable, "-c", BUILD, str(out), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert out.exists() == (moment in ("renamed", "published"))
    build_by_hand(out, "next", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert (out / MANIFEST_NAME).read_text() == "next"


@pytest.mark.parametrize("moment", ["empty", "half", "whole", "moved aside"])
def test_killed_before_an_engine_is_replaced(tmp_path: Path, moment: str) -> None:
    """The old engine is at its place, or is put back by the next build, which then needs --force like any other."""
    out = tmp_path / "engine"
    put_engine(out, "old")
    killed = subprocess.run([sys.executable, "-c", BUILD, str(out), moment], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match="holds an engine already"):
        build_by_hand(out, "next")
    assert (out / MANIFEST_NAME).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_failed_build_keeps_the_old_engine_and_releases_the_lock(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    put_engine(out, "old")
    with pytest.raises(ZeroDivisionError):
        build_by_hand(out, "new", force=True, before_publishing=lambda staging: 1 // 0)
    assert (out / MANIFEST_NAME).read_text() == "old"
    assert leftovers(out) == []
    build_by_hand(out, "new", force=True)
    assert (out / MANIFEST_NAME).read_text() == "new"


def test_rename_that_fails_puts_the_old_engine_back(tmp_path: Path) -> None:
    out = tmp_path / "engine"
    put_engine(out, "old")
    with pytest.raises(FileNotFoundError):
        build_by_hand(out, "new", force=True, before_publishing=shutil.rmtree)
    assert (out / MANIFEST_NAME).read_text() == "old"
    assert leftovers(out) == []


def test_names_with_wildcards_remove_nobody_elses_folder(tmp_path: Path) -> None:
    with staging_directory(tmp_path / "engine1", force=False) as other:
        build_by_hand(tmp_path / "engine[1]", "new")
        build_by_hand(tmp_path / "*", "new")
        assert other.is_dir()
    put_engine(tmp_path / ".engine[1].pop-build-7", "half")
    build_by_hand(tmp_path / "engine[1]", "newer", force=True)
    assert leftovers(tmp_path / "engine[1]") == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    put_engine(tmp_path / "disk" / "real", "old")
    out = tmp_path / "engine"
    out.symlink_to(tmp_path / "disk" / "real")
    build_by_hand(out, "new", force=True)
    assert out.is_symlink()
    assert (tmp_path / "disk" / "real" / MANIFEST_NAME).read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["disk", "engine", MANIFEST_NAME, "real"]


def start_build(kit: CliKit, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pop_engine.builder.cli", "-m", str(kit.checkpoint), "-o", str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As from a terminal: where the tests run in a shell's background, Ctrl-C would be ignored, and inherited so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_until(moment: Callable[[], object], build: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _GIVE_UP_S
    while not moment():
        assert build.poll() is None, build.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def tracers(build: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that trace: children of the server that the build has started."""
    servers = [child for child in psutil.Process(build.pid).children() if "forkserver" in command_line(child)]
    return [tracer for server in servers for tracer in server.children()]


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        # Libraries start short-lived programs of their own, which may end meanwhile.
        return ""


def is_importing_torch(build: subprocess.Popen[str]) -> bool:
    return "libtorch" in Path(f"/proc/{build.pid}/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("moment", ["importing", pytest.param("starting", marks=pytest.mark.nightly), "tracing"])
def test_interrupted(cli_kit: CliKit, tmp_path: Path, moment: str) -> None:
    """Ctrl-C on a terminal reaches every process of the build; one line comes out."""
    build = start_build(cli_kit, tmp_path / "engine")
    moments: dict[str, Callable[[], object]] = {
        "importing": lambda: is_importing_torch(build),
        "starting": lambda: tracers(build),
        "tracing": lambda: any(tmp_path.glob(".engine.pop-build-*/weights/*")),
    }
    wait_until(moments[moment], build)
    children = tracers(build)
    os.killpg(build.pid, signal.SIGINT)
    assert build.communicate() == ("", "pop-build: error: interrupted\n")
    assert build.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)


@pytest.mark.usefixtures("recycled")
def test_killed_while_tracing_and_built_again(cli_kit: CliKit, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    build = start_build(cli_kit, out)
    wait_until(lambda: len(tracers(build)) == 2 and any(tmp_path.glob(".engine.pop-build-*/weights/*")), build)
    children = tracers(build)
    build.kill()
    # The children hold the other ends of its pipes: they end with it.
    assert build.communicate() == ("", "")
    psutil.wait_procs(children, timeout=_GIVE_UP_S)
    assert not out.exists()
    assert len(leftovers(out)) == 2
    options = ["--weights", "copy", "--max-batch-size", "2"]
    assert main(["-m", str(cli_kit.checkpoint), "-o", str(out), *options]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    assert Manifest.load(out).verification.status == "passed"


def test_a_tracer_that_is_killed_fails_the_build(cli_kit: CliKit, tmp_path: Path) -> None:
    """As the system does where memory runs out."""
    build = start_build(cli_kit, tmp_path / "engine")
    wait_until(lambda: len(tracers(build)) == 2, build)
    tracers(build)[0].kill()
    out, err = build.communicate()
    assert (build.returncode, out) == (1, "")
    assert err.startswith("pop-build: error: the process that traces the ")
    assert err.endswith(" graph was ended (exit code -9), usually for lack of memory; free some and build again\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("recycled")
def test_forced_build_that_fails(
    cli_kit: CliKit, cli_engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (cli_engine / MANIFEST_NAME).read_bytes()

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    command = ["-m", str(cli_kit.checkpoint), "-o", str(cli_engine), "--force", "--weights", "copy"]
    command += ["--max-batch-size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "verify_engine", fail)
        assert main(command) == 1
    assert capsys.readouterr().err.startswith("pop-build: error: No space left on device; ")
    assert (cli_engine / MANIFEST_NAME).read_bytes() == before
    assert leftovers(cli_engine) == []
    assert main([*command, "--no-verify"]) == 0
    assert json.loads((cli_engine / MANIFEST_NAME).read_bytes())["verification"]["reason"] == "--no-verify"
