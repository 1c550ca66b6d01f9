"""What pop-bench knows of another engine before it is imported."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pop_engine.tools.bench.peers.checkpoint import PeerCheckpoint
from pop_engine.tools.bench.subject import Subject


@dataclass(frozen=True)
class PeerKind:
    """Another engine in one dtype. Nothing of it is imported until `prepare` or `load` runs, in a process of its own.

    `name` is what --peer takes, `package` what Python imports, `distribution` what pip installs. `prepare` writes
    the engine's own form of the checkpoint into a folder, where it needs one; `load` opens that folder, or else the
    checkpoint, with a number of threads.
    """

    name: str
    engine: str
    dtype: str
    package: str
    distribution: str
    load: Callable[[Path, int], Subject]
    prepare: Callable[[Path, Path], None] | None = None
    reads_gguf: bool = False

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.engine}, {self.dtype}"

    def obstacle(self, checkpoint: PeerCheckpoint) -> str | None:
        """Why it cannot run this checkpoint, where that is plain beforehand."""
        if self.reads_gguf and checkpoint.gguf is None:
            return "reads GGUF files only, and the engine was not built from one; give --gguf FILE"
        return None

    def dtype_of(self, checkpoint: PeerCheckpoint) -> str:
        """What the result calls its dtype: the file's name, where it runs the checkpoint's own GGUF file."""
        stored = self.reads_gguf and self.prepare is None and checkpoint.gguf is not None
        return f"{self.dtype}: {self.source(checkpoint).name}" if stored else self.dtype

    def source(self, checkpoint: PeerCheckpoint) -> Path:
        """What it reads of the checkpoint."""
        return checkpoint.gguf if self.reads_gguf and checkpoint.gguf is not None else checkpoint.folder
