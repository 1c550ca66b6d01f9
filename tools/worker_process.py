"""A worker process that stands still whenever it is not asked."""

import os
import signal
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

import msgspec

from pop_engine.configs.errors import EngineError
from pop_engine.tools.bench_message import BenchReply, BenchRequest


class Reply(Protocol):
    """What every worker says of itself with each reply."""

    @property
    def peak_memory_bytes(self) -> int:
        """The most that its process has held."""
        ...


AnyReply = TypeVar("AnyReply", bound=Reply)


class WorkerProcess:
    """One engine, loaded in a process of its own and stopped by signal between requests.

    Stopped, because the spinning threads of a loaded but idle engine slow another's timings by a factor of two
    (DESIGN.md, Traps), and switching spinning off would change what is measured.
    """

    def __init__(self, command: Sequence[str], name: str, stderr: IO[bytes] | None = None) -> None:
        """Start the worker and wait until it has loaded. Raises EngineError where it ends instead.

        With `stderr`, a file, what the worker says goes there, and its last line into the error.
        """
        self._name = name
        self._stderr = stderr
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8"
        )
        try:
            self.peak_memory_bytes = self._receive(BenchReply).peak_memory_bytes
            self._pause()
        except BaseException:
            self.close()
            raise

    def ask(self, request: BenchRequest) -> BenchReply:
        """Wake a benchmark's worker for one request. Raises EngineError where it ends without a reply."""
        return self.ask_for(request, BenchReply)

    def ask_for(self, request: object, reply_type: type[AnyReply]) -> AnyReply:
        """Wake the worker for a request of any type that msgspec encodes. Raises as `ask` does."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        reply = self._receive(reply_type)
        self._pause()
        self.peak_memory_bytes = reply.peak_memory_bytes
        return reply

    def close(self) -> None:
        """End the worker, stopped or not."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _receive(self, reply_type: type[AnyReply]) -> AnyReply:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return msgspec.json.decode(line, type=reply_type)

    def _pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # The signal takes effect a little later; another worker must not start before. WNOWAIT leaves an exit
        # status for Popen to collect.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _ended(self) -> EngineError:
        code = self._process.wait()
        said = self._last_line()
        more = f" ({said})" if said else "; its own message is above, if any"
        return EngineError(f"{self._name}: its worker ended with exit code {code}{more}")

    def _last_line(self) -> str:
        """What the worker said last, which is where Python names an exception."""
        if self._stderr is None:
            return ""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
