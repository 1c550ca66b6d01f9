"""What gpu_check measures, how long it may take, and what it says while it does."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class CheckPlan:
    """The sizes of a check. `device` is a torch device; `engines` are directories to measure beside those it builds.

    `checkpoint` is the Hugging Face folder that the engines were built from, to compare their numbers with.
    """

    device: str
    is_tiny: bool
    minutes: float
    engines: tuple[Path, ...] = ()
    checkpoint: Path | None = None

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Tokens of the prompts whose time to first token is measured."""
        return (8, 32) if self.is_tiny else (32, 128, 512, 2048, 8192)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sequences at once."""
        return (1, 2) if self.is_tiny else (1, 8)

    @property
    def seconds_per_case(self) -> float:
        """How long one size is repeated."""
        return 0.05 if self.is_tiny else 2.0

    @property
    def context_len(self) -> int:
        """Tokens that the cache holds while decode is measured."""
        return 16 if self.is_tiny else 512


@dataclass
class Budget:
    """Minutes that a check may take; a part that no longer fits is left out, and its record says so."""

    minutes: float
    _started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        return self.minutes * 60 - (time.monotonic() - self._started)

    def require(self, seconds: float, what: str) -> None:
        """Raise OutOfTimeError where `what` is likely to take longer than what is left."""
        if self.seconds_left < seconds:
            raise OutOfTimeError(f"{what}: about {seconds:.0f} s, and {self.seconds_left:.0f} s are left (--minutes)")


class OutOfTimeError(Exception):
    """A part was left out."""


def say(line: str) -> None:
    """A line of progress, for a person at a terminal."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)
