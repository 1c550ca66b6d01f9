"""Engines that an evaluation builds for itself, by pop-build as a user would run it."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import MANIFEST_NAME, Manifest
from pop_engine.tools.evaluation.progress import show_progress


@contextmanager
def full_engine(against: str, like: Manifest) -> Iterator[Path]:
    """The full engine: where `against` is one, that; else built from the model, with the limits of the engine `like`.

    What was built is removed afterwards. Raises UsageError or EngineError where the build does.
    """
    if (Path(against) / MANIFEST_NAME).is_file():
        yield Path(against)
        return
    limits = like.limits
    options = {
        "--tail-layers": 0,
        "--target": like.target.name,
        "--dtype": like.dtype,
        "--max-seq-len": limits.max_seq_len,
        "--max-batch-size": limits.max_batch_size,
        "--max-prefill-len": limits.max_prefill_len,
    }
    with TemporaryDirectory(prefix="pop-eval-") as folder:
        out = Path(folder) / "full"
        show_progress(f"building the full engine of {against}")
        build(against, out, [str(part) for option in options.items() for part in option], f"--against {against}")
        yield out


@dataclass(frozen=True)
class Command:
    """One of our commands, by the module behind it."""

    name: str
    module: str


POP_BUILD = Command("pop-build", "pop_engine.builder.cli")
POP_CALIBRATE = Command("pop-calibrate", "pop_engine.builder.analysis.calibrate_cli")


def build(model: str, out: Path, arguments: Sequence[str], asked: str) -> None:
    """Build an engine. Raises as `run_command` does."""
    run_command(POP_BUILD, ["--model", model, "--out", str(out), *arguments], asked)


def run_command(command: Command, arguments: Sequence[str], asked: str) -> None:
    """Run a command with its progress shown on a terminal.

    Raises UsageError or EngineError, as the command's exit code says, with its message after what was `asked`.
    """
    line = [sys.executable, "-m", command.module, *arguments]
    # On a terminal the command draws its progress itself, and says itself what was wrong.
    watched = sys.stderr.isatty()
    finished = subprocess.run(
        line, stdout=subprocess.DEVNULL, stderr=None if watched else subprocess.PIPE, text=True, check=False
    )
    if finished.returncode == 0:
        return
    messages = (finished.stderr or "").strip().splitlines() or [f"exit code {finished.returncode}, see above"]
    message = messages[-1].removeprefix(f"{command.name}: error: ")
    raise (UsageError if finished.returncode == 2 else EngineError)(f"{asked}: {command.name}: {message}")
