"""pop-calibrate as a user would run it: its calibration, and what it cost."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pop_engine.builder.analysis.calibration import Calibration, load_calibration
from pop_engine.configs.errors import EngineError


@dataclass(frozen=True)
class CalibrationRun:
    """One run: wall time from start to end, and the peak resident size of the process, weights included."""

    num_tokens: int
    seconds: float
    peak_memory_bytes: int


def run_pop_calibrate(
    model: str, data: str, num_tail_layers: int, num_tokens: int, out: Path
) -> tuple[Calibration, CalibrationRun]:
    """Run the command and read what it wrote. Raises EngineError where it fails."""
    command = [sys.executable, "-m", "pop_engine.builder.analysis.calibrate_cli", "-m", model, "--data", data]
    command += ["--tail-layers", str(num_tail_layers), "--num-tokens", str(num_tokens), "-o", str(out)]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        message = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise EngineError(f"pop-calibrate failed at {num_tail_layers} tail layers ({message.strip()})")
    calibration = load_calibration(out)
    # Linux counts in kilobytes.
    run = CalibrationRun(calibration.record.num_tokens, round(seconds, 1), usage.ru_maxrss * 1024)
    return calibration, run
