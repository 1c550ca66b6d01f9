"""Both graphs at once, each traced in a process of its own: tracing is slow, and one core's work."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from pathlib import Path

from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.target import target_of
from pop_engine.builder.export.trace import GraphSpec
from pop_engine.builder.graph import BuiltGraph, GraphJob, build_graph
from pop_engine.configs.build_config import ResolvedBuild
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
        traced = prefill_contract(plan, boundary, cache, vocab_size, boundary_writes=False)
        lowered = prefill_contract(plan, boundary, cache, vocab_size, boundary_writes=target.boundary_writes)
        decode = decode_contract(cache, vocab_size)
        if dump_dir is not None:
            dump_dir.mkdir(parents=True, exist_ok=True)

        def job(phase: Phase, own: GraphContract, after: GraphContract, file: str) -> GraphJob:
            spec = GraphSpec(phase, plan, boundary, own, dtype)
            return GraphJob(config, target.name, spec, after, layout, staging / file, dump_dir)

        self._jobs = [
            job("prefill", traced, lowered, PREFILL_GRAPH),
            job("decode", decode, decode, DECODE_GRAPH),
        ]

    def __enter__(self) -> "GraphWorkers":
        # Spawned, not forked: torch has threads by now, and a forked child could find their locks taken.
        context = multiprocessing.get_context("spawn")
        self._pool = context.Pool(len(self._jobs), initializer=_start_worker, initargs=(os.getpid(),))
        self._results: list[AsyncResult[BuiltGraph]] = [
            self._pool.apply_async(build_graph, (job,)) for job in self._jobs
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self._pool.close()
        else:
            self._pool.terminate()
        self._pool.join()

    def results(self) -> BuiltGraphs:
        """Wait for both graphs. Raises what building one raised."""
        prefill, decode = (result.get() for result in self._results)
        return BuiltGraphs(prefill, decode)


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it: an orphan would write into a folder that is no longer its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)
