"""What this machine can do at best: GFLOP/s of a large matrix product, and GB/s of weights read once.

Run as `python -m pop_engine.tools.bench.rates`; prints one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from pop_engine.configs.errors import EngineError
from pop_engine.tools.bound import MachineRates

# 67 million numbers, 268 MB: more than any cache of a processor holds.
_ROWS, _COLUMNS = 1 << 16, 1 << 10
_PRODUCT_SIZE = 1024
_REPEATS = 7


def measure_rates(threads: int) -> MachineRates:
    """Measure both in a process of its own. Raises EngineError where that fails."""
    # NumPy's matrix library takes its number of threads from there, and only when it is loaded.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "pop_engine.tools.bench.rates"]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise EngineError(f"--measure-rates: failed ({finished.stderr.strip().splitlines()[-1:]})")
    found = json.loads(finished.stdout)
    return MachineRates(found["flops_per_second"], found["bytes_per_second"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in this process and print."""
    argparse.ArgumentParser(prog="rates", description=__doc__).parse_args(argv)
    square = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    matrix, vector = np.ones((_ROWS, _COLUMNS), np.float32), np.ones(_COLUMNS, np.float32)
    found = {
        "flops_per_second": 2 * _PRODUCT_SIZE**3 / _fastest(lambda: square @ square),
        # A matrix times a vector is what a decode step is made of: every weight is read, and used once.
        "bytes_per_second": matrix.nbytes / _fastest(lambda: matrix @ vector),
    }
    print(json.dumps(found))
    return 0


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: a rate is what the machine can do, not what it did on average."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
