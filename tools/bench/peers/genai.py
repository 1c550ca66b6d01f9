"""onnxruntime-genai: ONNX Runtime with a generation loop, on a model that its own builder makes."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.subject import Prompts

_CONFIG = "genai_config.json"


class GenaiPeer:
    """One generator a batch. Its cache is made in `reserve`, so that only the prompt's run is timed."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._generator: Any = None

    def reserve(self, batch_size: int, max_len: int) -> None:
        """A generator with a cache of this length, in place."""
        og = _import()
        params = og.GeneratorParams(self._model)
        # One more, or the generator counts itself finished at the last token.
        params.set_search_options(do_sample=False, batch_size=batch_size, max_length=max_len + 1)
        self._generator = None
        self._generator = og.Generator(self._model, params)

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """All prompts at once."""
        import numpy as np

        self._generator.append_tokens(np.array(prompts, np.int32))
        yield from self._next()

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """The generator knows the tokens: it has chosen them itself."""
        return self._next()

    def _next(self) -> list[int]:
        self._generator.generate_next_token()
        return [int(token) for token in self._generator.get_next_tokens()]


def _import() -> Any:
    # Nowhere but where it is installed has it types to check.
    return import_module("onnxruntime_genai")


def prepare(folder: Path, out: Path, *, precision: str) -> None:
    """Run its model builder, as its documentation says to."""
    options = {"-i": folder, "-o": out, "-p": precision, "-e": "cpu", "-c": out / "cache"}
    arguments = [str(part) for option in options.items() for part in option]
    subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *arguments], check=True)


def load(model: Path, threads: int) -> GenaiPeer:
    """The model with as many threads as asked, and no token at which it would stop."""
    path = model / _CONFIG
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
    content["model"]["eos_token_id"] = []
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return GenaiPeer(_import().Model(str(model)))


def _kind(dtype: str) -> PeerKind:
    return PeerKind(
        name=f"onnxruntime-genai-{dtype}",
        engine="onnxruntime-genai",
        dtype=dtype,
        package="onnxruntime_genai",
        distribution="onnxruntime-genai",
        load=load,
        prepare=partial(prepare, precision=dtype),
    )


KINDS = (_kind("fp32"), _kind("int4"))
