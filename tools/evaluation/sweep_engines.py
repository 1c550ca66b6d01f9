"""The engines of a sweep: built below one folder, or found there."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.manifest import MANIFEST_NAME, file_sha256
from pop_engine.tools.evaluation.builds import POP_CALIBRATE, build, run_command
from pop_engine.tools.evaluation.options import SweepOptions
from pop_engine.tools.evaluation.progress import show_progress


@dataclass(frozen=True)
class WorkRecord:
    """What the engines of a work folder are made of; another sweep cannot use them."""

    model: str
    calibrate: str | None
    calibrate_sha256: str | None
    calibrate_tokens: int | None
    boundary_window: int | None
    max_seq_len: int | None


@dataclass(frozen=True)
class SweepEngines:
    """Builds the engines of a sweep below a folder, or finds them there."""

    model: str
    options: SweepOptions
    folder: Path

    def engine(self, num_tail_layers: int, *, calibrated: bool) -> Path:
        """An engine directory. pop-build renames what is finished, so one that is there is whole."""
        path = self.folder / f"tail-{num_tail_layers}{'-calibrated' if calibrated else ''}"
        if (path / MANIFEST_NAME).is_file():
            return path
        arguments = ["--tail-layers", str(num_tail_layers)]
        if self.options.max_seq_len is not None:
            arguments += ["--max-seq-len", str(self.options.max_seq_len)]
        if self.options.boundary_window is not None and num_tail_layers:
            arguments += ["--boundary-window", str(self.options.boundary_window)]
        if calibrated:
            arguments += ["--calibration", str(self._calibration(num_tail_layers))]
        show_progress(f"building {path.name}")
        build(self.model, path, arguments, f"--sweep {num_tail_layers}")
        return path

    def release(self, path: Path) -> None:
        """Remove an engine that nobody keeps: each may hold a copy of the weights. The full one is still used."""
        if self.options.work_dir is None and path.name != "tail-0":
            shutil.rmtree(path)

    def _calibration(self, num_tail_layers: int) -> Path:
        path = self.folder / f"calibration-{num_tail_layers}"
        if path.is_dir():
            return path
        assert self.options.calibrate is not None
        partial = self.folder / f".{path.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        arguments = ["--model", self.model, "--tail-layers", str(num_tail_layers), "--data", self.options.calibrate]
        if self.options.calibrate_tokens is not None:
            arguments += ["--num-tokens", str(self.options.calibrate_tokens)]
        show_progress(f"calibrating {num_tail_layers} tail layers")
        asked = f"--calibrate {self.options.calibrate}, {num_tail_layers} tail layers"
        run_command(POP_CALIBRATE, [*arguments, "--out", str(partial)], asked)
        # What has its name is whole: a killed sweep must not leave half a calibration to the next.
        partial.rename(path)
        return path


def work_record(model: str, options: SweepOptions) -> WorkRecord:
    """What the engines of a sweep are made of."""
    path = None if options.calibrate in (None, "self") else Path(str(options.calibrate))
    sha256 = None if path is None else file_sha256(path)
    flags = (options.calibrate_tokens, options.boundary_window, options.max_seq_len)
    return WorkRecord(model, options.calibrate, sha256, *flags)
