"""One graph in a process of its own: tracing is slow, and one core's work."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import TYPE_CHECKING

from pop_engine.configs.errors import EngineError

if TYPE_CHECKING:
    from pop_engine.builder.graph import BuiltGraph, GraphJob

_PRELOADED = "pop_engine.builder.graph"
_END_S = 5.0


def graph_context() -> ForkServerContext | SpawnContext:
    """How the processes are started: forked off a server that has imported torch once and nothing else has run in.

    Not forked off this process: torch has threads by then, and a child could find their locks taken.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    return context


def preload_graph_server() -> None:
    """Start the server now, on the core that this process leaves free while it imports the same libraries itself."""
    if isinstance(graph_context(), ForkServerContext):
        with interrupts_held():
            forkserver.ensure_running()


class GraphProcess:
    """A process that builds one graph, and the pipe that its one result comes from."""

    def __init__(self, job: "GraphJob") -> None:
        context = graph_context()
        self._phase = job.spec.phase
        self._pipe, of_child = context.Pipe()
        self._process = context.Process(target=_work, args=(job, of_child), daemon=True)
        self._process.start()
        # The child has the only other end now: where it dies, receiving ends too.
        of_child.close()

    def weights_written(self) -> None:
        """Let a plan be compiled that holds the weights."""
        # A process that is done, or dead, does not listen; `receive` tells which.
        with suppress(BrokenPipeError):
            self._pipe.send(None)

    def receive(self) -> "BuiltGraph":
        """Wait for the graph. Raises what building it raised, EngineError where its process was killed."""
        try:
            result: BuiltGraph | BaseException = self._pipe.recv()
        except (EOFError, ConnectionResetError) as error:
            self._process.join()
            raise EngineError(
                f"the process that traces the {self._phase} graph was ended (exit code {self._process.exitcode}), "
                "usually for lack of memory; free some and build again"
            ) from error
        # It has nothing left to do but to give back what its libraries hold of the system.
        self._process.join(_END_S)
        if isinstance(result, BaseException):
            raise result
        return result

    def end(self) -> None:
        """End the process, done or not."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
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


def _work(job: "GraphJob", pipe: Connection) -> None:
    """Build one graph and send it, or what went wrong; the process ends with the one that asked for it."""
    from pop_engine.builder.graph import build_graph

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result: BuiltGraph | Exception = build_graph(job, pipe.recv)
    except Exception as error:
        result = _portable(error)
    pipe.send(result)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note: tracebacks do not travel, and some errors do not either."""
    trace = "".join(traceback.format_exception(error))
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(trace)
    return copy


def _end_with_parent() -> None:
    """An orphan would write into a folder that is no longer its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
