"""Samples that are done, on disk as they come: an analysis that was killed goes on where it was."""

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from pop_engine.builder.analysis.importance import GateGradients
from pop_engine.configs.errors import EngineError


@dataclass(frozen=True)
class _Line:
    index: int
    gradients: GateGradients


class Journal:
    """A file of lines: what the samples depend on (`key`), then a line for each sample.

    A journal of another key is begun anew. Numbers come back to the bit.
    """

    def __init__(self, path: Path, key: dict[str, str]) -> None:
        self._path = path
        self._head = msgspec.json.encode(key) + b"\n"
        self.found: dict[int, GateGradients] = {}

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._read()
        # Unbuffered: a line is the kernel's before the next sample begins.
        self._file = self._path.open("r+b" if kept else "wb", buffering=0)
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self._file.write(self._head)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, index: int, gradients: GateGradients) -> None:
        """Keep one sample's gradients."""
        self._file.write(msgspec.json.encode(_Line(index, gradients)) + b"\n")
        self.found[index] = gradients

    def _read(self) -> int:
        """Fill `found` and return how many bytes of the file hold: 0 of another key, all but a line torn off."""
        content = self._path.read_bytes() if self._path.is_file() else b""
        if not content.startswith(self._head):
            return 0
        whole = content[: content.rindex(b"\n") + 1]
        for line in whole[len(self._head) :].splitlines():
            try:
                entry = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise EngineError(f"{self._path}: damaged ({error}); delete it and begin anew") from error
            self.found[entry.index] = entry.gradients
        return len(whole)
