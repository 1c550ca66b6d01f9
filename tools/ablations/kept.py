"""Scores in a folder, as they come: ablations that were stopped go on where they were."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from pop_engine.builder.analysis.calibration import CalibratedModel
from pop_engine.builder.analysis.self_text import SELF
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import file_sha256
from pop_engine.configs.whole_file import write_whole
from pop_engine.tools.ablations.catalogue import AblationName
from pop_engine.tools.ablations.result import AblationRow
from pop_engine.tools.ablations.scores import Scored
from pop_engine.tools.evaluation.data import EvalData
from pop_engine.tools.evaluation.options import AblationOptions, EvalOptions

_FULL_NAME = "full"
_Content = TypeVar("_Content")


@dataclass(frozen=True)
class WorkRecord:
    """All that a score depends on, but for the names of the ablations: others may be added later."""

    model: CalibratedModel
    data_sha256: str
    num_documents: int
    context_len: int | None
    max_tokens: int
    chat: bool
    calibrate: str | None
    calibrate_sha256: str | None
    calibrate_tokens: int | None

    @classmethod
    def of(cls, options: EvalOptions, asked: AblationOptions, model: CalibratedModel, data: EvalData) -> "WorkRecord":
        """Of what was asked for."""
        is_file = asked.calibrate not in (None, SELF)
        return cls(
            model=model,
            data_sha256=data.sha256,
            num_documents=len(data.examples),
            context_len=options.context_len,
            max_tokens=options.max_tokens,
            chat=options.chat,
            calibrate=asked.calibrate,
            calibrate_sha256=file_sha256(Path(str(asked.calibrate))) if is_file else None,
            calibrate_tokens=asked.calibrate_tokens,
        )


@dataclass(frozen=True)
class KeptScores:
    """A file for the full model's scores, and one for each ablation's."""

    folder: Path

    def full(self) -> tuple[Scored, ...] | None:
        """The full model's, where they are there."""
        return self._read(_FULL_NAME, tuple[Scored, ...])

    def row(self, name: AblationName) -> AblationRow | None:
        """An ablation's, where they are there."""
        return self._read(name, AblationRow)

    def keep_full(self, scored: tuple[Scored, ...]) -> None:
        """Write the full model's."""
        self._write(_FULL_NAME, scored)

    def keep_row(self, row: AblationRow) -> None:
        """Write an ablation's. What was refused is tried again the next time."""
        if row.scores is not None:
            self._write(row.name, row)

    def _read(self, name: str, kind: type[_Content]) -> _Content | None:
        path = self._path(name)
        if not path.is_file():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{path}: damaged ({error}); delete it and begin anew") from error

    def _write(self, name: str, content: object) -> None:
        write_whole(self._path(name), msgspec.json.encode(content))

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
