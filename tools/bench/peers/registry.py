"""The peers, by name."""

import importlib.util
from collections.abc import Sequence
from importlib import metadata

from pop_engine.configs.errors import UsageError
from pop_engine.tools.bench.peers import genai, llama_cpp, mobius, transformers
from pop_engine.tools.bench.peers.kind import PeerKind

PEERS: tuple[PeerKind, ...] = (*transformers.KINDS, *genai.KINDS, *llama_cpp.KINDS, *mobius.KINDS)


def select(names: Sequence[str]) -> tuple[PeerKind, ...]:
    """Those that are named, or all where none is."""
    return tuple(kind for kind in PEERS if not names or kind.name in names)


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError where a name is no peer's."""
    known = [kind.name for kind in PEERS]
    for name in names:
        if name not in known:
            raise UsageError(f"--peer {name}: expected one of {', '.join(known)}")


def installed_version(kind: PeerKind) -> str | None:
    """The version of its package, or None where it is not installed. Imports nothing."""
    if importlib.util.find_spec(kind.package) is None:
        return None
    try:
        return metadata.version(kind.distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def list_peers() -> list[str]:
    """A line each: name, and whether it is installed."""
    width = max(len(kind.name) for kind in PEERS)
    lines = []
    for kind in PEERS:
        version = installed_version(kind)
        state = f"not installed; pip install {kind.distribution}" if version is None else version
        lines.append(f"{kind.name.ljust(width)}  {kind.distribution} {state}")
    return lines
