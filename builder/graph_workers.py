"""Both graphs at once, each traced in a process of its own: tracing is slow, and one core's work."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.target import target_of
from pop_engine.builder.export.trace import GraphSpec
from pop_engine.builder.graph import BuiltGraph, GraphJob, build_graph
from pop_engine.configs.build_config import ResolvedBuild
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import CacheShape, GraphContract, Phase, decode_contract, prefill_contract
from pop_engine.configs.manifest import DECODE_GRAPH, PREFILL_GRAPH

_PARENT_CHECK_S = 0.5


@dataclass(frozen=True)
class BuiltGraphs:
    """The two graphs of an engine."""

    prefill: BuiltGraph
    decode: BuiltGraph


class GraphWorkers:
    """Starts tracing when it is entered; `results` waits. Leaving it early ends the processes."""

    def __init__(
        self,
        config: PretrainedConfig,
        resolved: ResolvedBuild,
        cache: CacheShape,
        layout: WeightLayout,
        staging: Path,
        dump_dir: Path | None,
    ) -> None:
        vocab_size = config.get_text_config(decoder=True).vocab_size
        plan, boundary, dtype = resolved.plan, resolved.boundary, resolved.dtype
        target = target_of(resolved.target)

        def prefill(*, boundary_writes: bool) -> GraphContract:
            return prefill_contract(
                plan,
                boundary,
                cache,
                vocab_size,
                boundary_writes=boundary_writes,
                num_boundary=target.num_boundary,
            )

        traced, lowered = prefill(boundary_writes=False), prefill(boundary_writes=target.boundary_writes)
        decode = decode_contract(cache, vocab_size)
        if dump_dir is not None:
            dump_dir.mkdir(parents=True, exist_ok=True)

        def job(phase: Phase, own: GraphContract, after: GraphContract, file: str) -> GraphJob:
            spec = GraphSpec(phase, plan, boundary, own, dtype, calibrated=layout.is_calibrated)
            return GraphJob(
                config, target.name, spec, after, layout, resolved.limits, resolved.gpu, staging / file, dump_dir
            )

        self._jobs = [
            job("prefill", traced, lowered, PREFILL_GRAPH),
            job("decode", decode, decode, DECODE_GRAPH),
        ]

    def __enter__(self) -> "GraphWorkers":
        # Spawned, not forked: torch has threads by now, and a forked child could find their locks taken.
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        try:
            with _interrupts_held():
                for job in self._jobs:
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(job, sender, os.getpid()), daemon=True)
                    process.start()
                    # The child has the only sending end now: where it dies, receiving ends too.
                    sender.close()
                    self._workers.append(_Worker(job.spec.phase, process, receiver))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.results.close()

    def results(self) -> BuiltGraphs:
        """Wait for both graphs. Raises what building one raised, EngineError where its process was killed."""
        prefill, decode = (worker.receive() for worker in self._workers)
        return BuiltGraphs(prefill, decode)


@dataclass(frozen=True)
class _Worker:
    """One graph's process, and the end of the pipe that its one result comes from."""

    phase: Phase
    process: BaseProcess
    results: Connection

    def receive(self) -> BuiltGraph:
        try:
            result = self.results.recv()
        except EOFError as error:
            self.process.join()
            raise EngineError(
                f"the process that traces the {self.phase} graph was ended (exit code {self.process.exitcode}), "
                "usually for lack of memory; free some and build again"
            ) from error
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, BuiltGraph)
        return result


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that start here never see Ctrl-C, which reaches all of a terminal's: the parent ends them."""
    # Its own start would let interrupts through again.
    resource_tracker.ensure_running()
    # The mask is for the children, who inherit it. Here another thread would still take the signal, and a child
    # whose start is interrupted complains: so it is only noted until all are started.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_main = threading.current_thread() is threading.main_thread()
    noted: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number)) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if noted:
        signal.raise_signal(signal.SIGINT)


def _work(job: GraphJob, results: Connection, parent: int) -> None:
    """Build one graph and send it, or what went wrong; the process ends with its parent."""
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        result: BuiltGraph | Exception = build_graph(job)
    except Exception as error:
        result = _portable(error)
    results.send(result)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note: tracebacks do not travel, and some errors do not either."""
    trace = "".join(traceback.format_exception(error))
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(trace)
    return copy


def _end_with_parent(parent: int) -> None:
    """An orphan would write into a folder that is no longer its own."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
