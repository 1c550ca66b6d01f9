"""Files that are there whole or not at all: a program may be killed at any time."""

from pathlib import Path

import msgspec


def write_whole(path: Path, content: bytes) -> None:
    """Write beside the file first, then put it in its place."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def write_json(path: Path, content: object) -> None:
    """Write a dataclass, or what msgspec takes, as indented JSON."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
