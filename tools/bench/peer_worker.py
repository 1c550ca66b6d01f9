"""The process of one peer: `prepare` makes its form of the checkpoint, `load` times it as bench_worker does ours."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pop_engine.tools.bench.peers.registry import PEERS
from pop_engine.tools.bench.subject import time_batch
from pop_engine.tools.bench_message import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run either verb. What goes wrong is the peer's own exception: its last line is what pop-bench reports."""
    parser = argparse.ArgumentParser(prog="peer_worker", description="Prepare or time one peer for pop-bench.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("prepare", "load"):
        added = verbs.add_parser(verb)
        added.add_argument("peer", choices=[kind.name for kind in PEERS])
        added.add_argument("model", type=Path)
    verbs.choices["prepare"].add_argument("--out", type=Path, required=True)
    verbs.choices["load"].add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args(argv)
    kind = next(kind for kind in PEERS if kind.name == arguments.peer)
    if arguments.verb == "prepare":
        assert kind.prepare is not None, "pop-bench asks only those that need it"
        kind.prepare(arguments.model, arguments.out)
    else:
        _keep_stdout_for_replies()
        subject = kind.load(arguments.model, arguments.threads)
        serve(lambda request: time_batch(subject, request))
    return 0


def _keep_stdout_for_replies() -> None:
    """Native code may print to file descriptor 1, which would be taken for a reply."""
    replies = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(replies, "w", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
