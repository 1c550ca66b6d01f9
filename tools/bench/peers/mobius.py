"""mobius-onnx: models built as ONNX graphs by hand, run here in a plain session of ONNX Runtime."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.subject import Prompts

_PAST = re.compile(r"past_key_values\.(\d+)\.(key|value)")


class MobiusPeer:
    """Past and present are one buffer, as its graph for the CPU allows: GroupQueryAttention writes in place."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs = {node.name for node in session.get_inputs()}
        self._past = {node.name: node for node in session.get_inputs() if _PAST.fullmatch(node.name)}
        (self._logits,) = (node for node in session.get_outputs() if node.name == "logits")
        self._caches: dict[str, Any] = {}
        self._length = 0
        self._max_len = 0

    def reserve(self, batch_size: int, max_len: int) -> None:
        """A cache of this length."""
        import numpy as np

        shapes = {name: (batch_size, node.shape[1], max_len, node.shape[3]) for name, node in self._past.items()}
        self._caches = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._length, self._max_len = 0, max_len

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """All prompts in one run. The graph computes the logits of every token; the last ones are used."""
        yield from self._step(prompts)

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """One run."""
        return self._step([[token] for token in token_ids])

    def _step(self, rows: Prompts) -> list[int]:
        import numpy as np

        input_ids = np.array(rows, np.int64)
        batch_size, num_tokens = input_ids.shape
        positions = np.arange(self._length, self._length + num_tokens, dtype=np.int64)
        self._length += num_tokens
        logits = np.empty((batch_size, num_tokens, self._logits.shape[2]), np.float32)
        binding = self._session.io_binding()
        inputs = {
            "input_ids": input_ids,
            "attention_mask": np.ones((batch_size, self._length), np.int64),
            "position_ids": np.ascontiguousarray(np.broadcast_to(positions, input_ids.shape)),
        }
        # Fused, attention counts positions itself, and the graph has no input for them.
        given = {name: value for name, value in inputs.items() if name in self._inputs}
        for name, value in {**given, **self._caches}.items():
            binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        for name, cache in self._caches.items():
            present = _PAST.sub(r"present.\1.\2", name)
            binding.bind_output(present, "cpu", 0, cache.dtype, cache.shape, cache.ctypes.data)
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        found: list[int] = logits[:, -1].argmax(-1).tolist()
        return found


def prepare(folder: Path, out: Path) -> None:
    """Its command for ONNX Runtime on the CPU."""
    command = [sys.executable, "-m", "mobius", "build", "--config", str(folder), "--dtype", "f32", "--ep", "cpu"]
    subprocess.run([*command, str(out)], check=True)


def load(model: Path, threads: int) -> MobiusPeer:
    """A session over its graph."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return MobiusPeer(ort.InferenceSession(model / "model.onnx", options, providers=["CPUExecutionProvider"]))


KINDS = (
    PeerKind(
        name="mobius-onnx-fp32",
        engine="mobius-onnx",
        dtype="fp32",
        package="mobius",
        distribution="mobius-onnx",
        load=load,
        prepare=prepare,
    ),
)
