"""Who takes part in a run: our engines, and the peers that are installed and load."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.bench.contest import Entrant, show_progress
from pop_engine.tools.bench.options import BenchOptions, PeerOptions
from pop_engine.tools.bench.peers.checkpoint import PeerCheckpoint, peer_checkpoint
from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.peers.registry import installed_version, select
from pop_engine.tools.bench.result import FULL, POP, AbsentPeer, EngineRecord, Kind
from pop_engine.tools.bench_result import describe_engine_facts
from pop_engine.tools.worker_process import WorkerProcess


@dataclass
class Participant:
    """An entrant and what is said of it in the result."""

    entrant: Entrant
    kind: Kind
    dtype: str
    versions: dict[str, str]
    manifest: Manifest | None = None
    path: Path | None = None

    def record(self) -> EngineRecord:
        """What it was, and the most memory its process has taken."""
        peak = self.entrant.worker.peak_memory_bytes
        facts = None if self.manifest is None else describe_engine_facts(str(self.path), self.manifest, peak)
        return EngineRecord(self.entrant.name, self.kind, self.dtype, self.versions, facts, peak)


@dataclass
class Participants:
    """Everyone of a run, POP first, then the full engine where there is one."""

    members: list[Participant] = field(default_factory=list)
    absent: list[AbsentPeer] = field(default_factory=list)

    @property
    def entrants(self) -> list[Entrant]:
        """Those that have not failed."""
        return [member.entrant for member in self.members if member.entrant.failure is None]

    @property
    def own_entrants(self) -> list[Entrant]:
        """Ours alone."""
        return [member.entrant for member in self.members if member.kind != "peer"]

    def all_absent(self) -> tuple[AbsentPeer, ...]:
        """Those that never ran and those that stopped."""
        failed = [(member.entrant.name, member.entrant.failure) for member in self.members]
        return (*self.absent, *(AbsentPeer(name, reason) for name, reason in failed if reason is not None))


@contextmanager
def open_participants(options: BenchOptions, pop: Manifest, full: Manifest | None) -> Iterator[Participants]:
    """Load everyone, each in a process of its own that stands still until it is asked."""
    found = Participants()
    with ExitStack() as stack:
        found.members.append(_engine(stack, POP, "pop", options.engine, pop, options.threads))
        if options.against is not None and full is not None:
            found.members.append(_engine(stack, FULL, "full", options.against, full, options.threads))
        if options.peers is not None:
            _add_peers(found, stack, options, options.peers, pop)
        yield found


def _engine(stack: ExitStack, name: str, kind: Kind, path: Path, manifest: Manifest, threads: int) -> Participant:
    entrant = Entrant(name, stack.enter_context(start_engine(path, threads)))
    return Participant(entrant, kind, manifest.dtype, manifest.target.versions, manifest, path)


def start_engine(path: Path, threads: int) -> WorkerProcess:
    """A worker process that has loaded an engine of ours."""
    show_progress(f"loading {path}")
    command = [sys.executable, "-m", "pop_engine.tools.bench_worker", str(path), "--threads", str(threads)]
    return WorkerProcess(command, str(path))


def _add_peers(found: Participants, stack: ExitStack, options: BenchOptions, peers: PeerOptions, pop: Manifest) -> None:
    if peers.work_dir is None:
        work_dir = Path(stack.enter_context(TemporaryDirectory(prefix="pop-bench-")))
    else:
        work_dir = peers.work_dir
        work_dir.mkdir(parents=True, exist_ok=True)
    checkpoint = peer_checkpoint(options.engine, pop, work_dir, peers.gguf)
    for kind in select(peers.names):
        version = installed_version(kind)
        if version is None:
            found.absent.append(AbsentPeer(kind.title, f"not installed; `pip install {kind.distribution}` brings it"))
            continue
        try:
            worker = stack.enter_context(_start_peer(kind, checkpoint, work_dir, options.threads))
        except EngineError as error:
            found.absent.append(AbsentPeer(kind.title, str(error)))
            continue
        entrant = Entrant(kind.title, worker, is_peer=True)
        found.members.append(Participant(entrant, "peer", kind.dtype_of(checkpoint), {kind.distribution: version}))
    show_progress("")


@contextmanager
def _start_peer(kind: PeerKind, checkpoint: PeerCheckpoint, work_dir: Path, threads: int) -> Iterator[WorkerProcess]:
    """Prepare its model and load it. Raises EngineError, with the last thing that it said, where it cannot."""
    show_progress(f"preparing {kind.title}")
    model = _prepare(kind, checkpoint, work_dir)
    show_progress(f"loading {kind.title}")
    command = _command("load", kind, model, "--threads", str(threads))
    # Their libraries talk a lot; what they say matters only where they fail.
    with TemporaryFile() as said, WorkerProcess(command, kind.title, stderr=said) as worker:
        yield worker


def _prepare(kind: PeerKind, checkpoint: PeerCheckpoint, work_dir: Path) -> Path:
    """The peer's own form of the checkpoint. What a killed run left half made is made again."""
    obstacle = kind.obstacle(checkpoint)
    if obstacle is not None:
        raise EngineError(obstacle)
    source = kind.source(checkpoint)
    if kind.prepare is None:
        return source
    model = work_dir / kind.name
    done = model / ".prepared"
    if not done.is_file():
        model.mkdir(parents=True, exist_ok=True)
        finished = subprocess.run(
            _command("prepare", kind, source, "--out", str(model)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode != 0:
            raise EngineError(f"its model could not be made ({last_line(finished.stderr, finished.returncode)})")
        done.touch()
    return model


def _command(verb: str, kind: PeerKind, model: Path, *rest: str) -> Sequence[str]:
    module = "pop_engine.tools.bench.peer_worker"
    return [sys.executable, "-m", module, verb, kind.name, str(model), *rest]


def last_line(said: str, code: int) -> str:
    """What a process said last, which is where Python names an exception."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with exit code {code} and said nothing"
