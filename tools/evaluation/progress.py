"""The progress line of an evaluation, on a terminal only."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def show_progress(text: str) -> None:
    """Replace the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def with_progress(items: Sequence[Item], title: str) -> Iterator[Item]:
    """The items, with how many are done and about how long the rest takes."""
    started = time.perf_counter()
    for index, item in enumerate(items):
        left = "" if not index else f", {(time.perf_counter() - started) / index * (len(items) - index):.0f} s left"
        show_progress(f"{title}: {index} of {len(items)}{left}")
        yield item
    show_progress("")
