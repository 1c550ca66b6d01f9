"""Whether an engine directory still holds the files that its manifest lists, to the byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import describe_os_error
from pop_engine.configs.manifest import MANIFEST_NAME, FileRecord, Manifest, file_sha256


@dataclass(frozen=True)
class IntegrityCheck:
    """The result: one line per damaged file, and the files in the directory that the manifest does not list."""

    num_files: int
    failures: tuple[str, ...]
    unlisted: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Every listed file is there and unchanged. An unlisted file is no failure."""
        return not self.failures

    def lines(self) -> list[str]:
        """The result for people, the verdict last."""
        verdict = f"all {self.num_files} files match"
        if self.failures:
            verdict = f"{len(self.failures)} of {self.num_files} files do not match; build the engine again"
        return [*self.failures, *(f"{name}: not listed in {MANIFEST_NAME}" for name in self.unlisted), verdict]


def check_integrity(directory: Path, manifest: Manifest) -> IntegrityCheck:
    """Recompute size and SHA-256 of every listed file, weights included wherever they lie. Reads all of them."""
    listed = dict(_listed_files(directory, manifest))
    failures = [problem for path, record in listed.items() if (problem := find_problem(path, record))]
    known = {*listed, directory / MANIFEST_NAME}
    found = sorted(path for path in directory.rglob("*") if path.is_file() and path not in known)
    unlisted = tuple(str(path.relative_to(directory)) for path in found)
    return IntegrityCheck(len(listed), tuple(failures), unlisted)


def find_problem(path: Path, record: FileRecord) -> str | None:
    """What is wrong with one file, as a line that names it, or None."""
    if not path.is_file():
        target = f" (a link to {path.readlink()})" if path.is_symlink() else ""
        return f"{path}: missing{target}"
    try:
        num_bytes = path.stat().st_size
        if num_bytes != record.num_bytes:
            return f"{path}: size differs: {num_bytes} bytes, expected {record.num_bytes}"
        sha256 = file_sha256(path)
    except OSError as error:
        return f"{path}: cannot be read: {describe_os_error(error)}"
    if sha256 != record.sha256:
        return f"{path}: hash differs: sha256 {sha256}, expected {record.sha256}"
    return None


def _listed_files(directory: Path, manifest: Manifest) -> Iterator[tuple[Path, FileRecord]]:
    for record in manifest.files:
        yield directory / record.path, record
    if manifest.weights is not None:
        # The path of a referenced file is absolute and replaces the engine's in the join.
        for record in manifest.weights.files:
            yield directory / record.path, record
