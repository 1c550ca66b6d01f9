"""A folder that keeps what an evaluation made, for the next run with the same options."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from pop_engine.configs.errors import UsageError

_RECORD_NAME = "pop-eval.json"


@contextmanager
def work_folder(path: Path | None, record: object) -> Iterator[Path]:
    """The folder at `path`, if what it holds was made for `record`; without a path one that is removed at the end.

    `record` is a dataclass with all that decides what is made. Raises UsageError where the folder is another's.
    """
    if path is None:
        with TemporaryDirectory(prefix="pop-eval-") as folder:
            yield Path(folder)
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"--work-dir {path}: is a file; choose a folder")
    path.mkdir(parents=True, exist_ok=True)
    written = path / _RECORD_NAME
    if written.is_file():
        if written.read_bytes() != msgspec.json.encode(record):
            raise UsageError(
                f"--work-dir {path}: holds what was made for another model or with other options; choose another folder"
            )
    elif any(path.iterdir()):
        raise UsageError(f"--work-dir {path}: is in use; choose an empty or a new folder")
    written.write_bytes(msgspec.json.encode(record))
    yield path
