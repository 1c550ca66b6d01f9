"""What a build shows while it runs: the step, how far it is, and how long each took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class BuildProgress:
    """Steps with a live bar on a terminal; silent elsewhere, unless verbose. `step_seconds` fills as steps end."""

    def __init__(self, *, verbose: bool) -> None:
        self.step_seconds: dict[str, float] = {}
        self._verbose = verbose
        self._console = Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def __enter__(self) -> "BuildProgress":
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    @contextmanager
    def step(self, name: str) -> Iterator["StepProgress"]:
        """Show a step while its body runs."""
        started = time.perf_counter()
        task = self._bars.add_task(name, total=None)
        try:
            yield StepProgress(self._bars, task)
        finally:
            self._bars.remove_task(task)
        self.step_seconds[name] = round(time.perf_counter() - started, 2)
        if self._verbose:
            self._console.print(f"{name}: {self.step_seconds[name]} s")


class StepProgress:
    """How far one step is. Its task is a bar of rich's, which knows it by a number."""

    def __init__(self, bars: Progress, task: int) -> None:
        self._bars = bars
        self._task = task

    def __call__(self, done: int, total: int) -> None:
        """Say how much is done, in any unit."""
        self._bars.update(self._task, completed=done, total=total)  # type: ignore[arg-type]
