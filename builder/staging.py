"""The folder an engine is written to before it is one: a temporary sibling, renamed at the very end."""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import MANIFEST_NAME

_OLD_SUFFIX = "-old"


@contextmanager
def staging_directory(out: Path, *, force: bool) -> Iterator[Path]:
    """An empty folder beside `out`, which `publish` turns into it. Removed again where the build fails.

    Leftovers of killed builds into the same folder are removed first. Raises UsageError where `out` may not be
    written: it is in use, holds something else, or another build is at it.
    """
    # A link stays one: the folder behind it is what gets replaced.
    out = out.resolve()
    with _parents(out), _lock(out):
        _remove_leftovers(out)
        check_out(out, force=force)
        staging = out.parent / f".{out.name}.pop-build-{os.getpid()}"
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def publish(staging: Path, out: Path) -> None:
    """Rename the finished folder to its place. An engine that stands there is moved aside first, then removed."""
    out = out.resolve()
    old = staging.with_name(staging.name + _OLD_SUFFIX)
    if out.exists():
        out.rename(old)
    try:
        staging.rename(out)
    except BaseException:
        _put_back(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path, out: Path) -> None:
    """Undo half a replacement."""
    if old.exists() and not out.exists():
        old.rename(out)


def _remove_leftovers(out: Path) -> None:
    """Remove what killed builds have left; an engine that one had moved aside and not yet replaced is put back."""
    for leftover in out.parent.glob(f".{glob.escape(out.name)}.pop-build-*"):
        if leftover.name.endswith(_OLD_SUFFIX):
            _put_back(leftover, out)
        shutil.rmtree(leftover, ignore_errors=True)


def check_out(out: Path, *, force: bool) -> None:
    """Raises UsageError where a folder may not be written, as far as one look tells."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; choose another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise UsageError(f"--out {out}: is in use and holds no engine; choose an empty or a new folder")
    if not force:
        raise UsageError(f"--out {out}: holds an engine already; add --force to replace it, or choose another folder")


@contextmanager
def _parents(out: Path) -> Iterator[None]:
    """Make the folders above `out`; those that were not there before and hold nothing at the end are removed again."""
    missing = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for folder in missing:
            # Not empty: the engine lies there, or somebody else's file.
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the lock on building into `out`. The system releases it when the process ends, however it ends."""
    path = out.parent / f".{out.name}.pop-build.lock"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise BlockingIOError
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(
            f"--out {out}: another build is writing there; wait for it, or choose another folder"
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
