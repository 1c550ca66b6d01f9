"""What the tools' command lines share: numbers, and files to write."""

import argparse
from pathlib import Path

from pop_engine.configs.errors import UsageError


def parse_counts(text: str) -> tuple[int, ...]:
    """`32,128` as numbers. Raises ArgumentTypeError, which argparse turns into its usage message."""
    try:
        counts = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers of at least 1 between commas")
    return counts


def parse_count(text: str) -> int:
    """One number. Raises ArgumentTypeError as above."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def check_writable(flag: str, path: Path | None) -> None:
    """Raise UsageError where a file that a flag names cannot be written. None is no file."""
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: the folder {path.parent} does not exist; make it first")
    if path is not None and path.is_dir():
        raise UsageError(f"{flag} {path}: is a folder; give a file name")
