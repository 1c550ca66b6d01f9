"""What pop-bench found, with all that a figure needs beside it. A file holds runs, each whole in itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pop_engine.configs.errors import UsageError
from pop_engine.configs.whole_file import write_json
from pop_engine.tools.bench.percentiles import Percentiles
from pop_engine.tools.bench_result import EngineFacts
from pop_engine.tools.bound import MachineRates
from pop_engine.tools.machine import Machine

POP, FULL = "POP", "full engine"
Kind = Literal["pop", "full", "peer"]


@dataclass(frozen=True)
class EngineRecord:
    """One that took part. `facts` is there for engines of ours; the peak is of its process, loading included."""

    name: str
    kind: Kind
    dtype: str
    versions: dict[str, str]
    facts: EngineFacts | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class AbsentPeer:
    """A peer that did not take part, or stopped before the end, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Timing:
    """One engine at one prompt length and batch size.

    `ttft_ms` runs from the prompts' tokens to each first token, `tpot_ms` is the mean of a round's decode steps,
    `itl_ms` every step; `tokens_per_second` counts generated tokens of the whole batch. The ratios are this engine's
    time over POP's in the same round. `num_same_tokens` counts how many of the first prompt's tokens are the full
    engine's before the first that differs.
    """

    engine: str
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    tokens_per_second: Percentiles
    ttft_ratio: Percentiles | None
    tpot_ratio: Percentiles | None
    num_same_tokens: int | None


@dataclass(frozen=True)
class BatchRow:
    """Everyone at one prompt length and batch size.

    `bound` is how much faster POP's first token can be at best (tools/bound.py), `ratio_to_bound` the share of it
    that was reached against the full engine. With the machine's rates, `tpot_bound_ms` is the time in which every
    weight can be read once, which a decode step of these weights cannot beat.
    """

    input_len: int
    output_len: int
    batch_size: int
    bound: float
    roofline_bound: float | None
    ratio_to_bound: float | None
    timings: tuple[Timing, ...]
    tpot_bound_ms: float | None = None


@dataclass(frozen=True)
class LoadTiming:
    """One engine under a load: of each request the first token, the mean of the later ones, and the last.

    Times run from the request's arrival, waiting for a slot included. `tokens_per_second` and `requests_per_second`
    have one sample a round.
    """

    engine: str
    ttft_ms: Percentiles
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    latency_ms: Percentiles
    tokens_per_second: Percentiles
    requests_per_second: Percentiles


@dataclass(frozen=True)
class LoadRow:
    """Our engines at one prompt length, with so many requests in flight."""

    input_len: int
    output_len: int
    concurrency: int
    num_requests: int
    timings: tuple[LoadTiming, ...]


@dataclass(frozen=True)
class BenchRun:
    """One call of pop-bench. `matmul_bound` is the paper's: the layers' matrix products alone."""

    machine: Machine
    threads: int
    repeats: int
    seed: int
    matmul_bound: float
    engines: tuple[EngineRecord, ...]
    absent: tuple[AbsentPeer, ...]
    rows: tuple[BatchRow, ...]
    loads: tuple[LoadRow, ...]
    rates: MachineRates | None = None


@dataclass(frozen=True)
class BenchResult:
    """A file of pop-bench."""

    runs: tuple[BenchRun, ...]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> "BenchResult":
        """Read a file. Raises UsageError where it is none of pop-bench's."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}: not a result of pop-bench ({error}); name another file") from error
