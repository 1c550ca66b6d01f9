"""Numbers on the command lines of the benchmarks."""

import argparse


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
