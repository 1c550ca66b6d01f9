"""llama.cpp through llama-cpp-python's bindings of its C interface."""

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.subject import Prompts

_MODEL = "model.gguf"


class LlamaCppPeer:
    """One context a batch, with llama.cpp's own defaults but for the number of threads."""

    def __init__(self, model: Any, threads: int) -> None:
        self._llama = llama = _import()
        self._model = model
        self._threads = threads
        self._context: Any = None
        self._batch: Any = None
        self._num_sequences = 0
        self._length = 0
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def reserve(self, batch_size: int, max_len: int) -> None:
        """A new context."""
        llama = self._llama
        if self._context is not None:
            llama.llama_free(self._context)
            llama.llama_batch_free(self._batch)
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = batch_size * max_len
        params.n_seq_max = batch_size
        params.n_threads = params.n_threads_batch = self._threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context for {batch_size} sequences of {max_len} tokens")
        self._batch = llama.llama_batch_init(batch_size * max_len, 0, 1)
        self._num_sequences, self._length = batch_size, 0

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """All prompts in one call, logits of their last tokens alone."""
        yield from self._step(prompts)

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """One call."""
        return self._step([[token] for token in token_ids])

    def _step(self, rows: Prompts) -> list[int]:
        import numpy as np

        llama, batch = self._llama, self._batch
        places, last_places = 0, []
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[places], batch.pos[places] = token, self._length + offset
                batch.n_seq_id[places], batch.seq_id[places][0] = 1, sequence
                batch.logits[places] = offset == len(row) - 1
                places += 1
            last_places.append(places - 1)
        batch.n_tokens = places
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode of {places} tokens gave {code}")
        self._length += len(rows[0])
        rows_of_logits = (llama.llama_get_logits_ith(self._context, place) for place in last_places)
        return [int(np.ctypeslib.as_array(found, (self._vocab_size,)).argmax()) for found in rows_of_logits]


def _import() -> Any:
    # Nowhere but where it is installed has it types to check.
    return import_module("llama_cpp")


def prepare(gguf: Path, out: Path, *, file_type: str) -> None:
    """The checkpoint's GGUF file in another dtype, by llama.cpp's own quantizer."""
    llama = _import()
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_{file_type}")
    # From 4 bits up: the numbers stay as they are, only their form changes.
    params.allow_requantize = True
    code = llama.llama_model_quantize(str(gguf).encode(), str(out / _MODEL).encode(), params)
    if code != 0:
        raise RuntimeError(f"llama_model_quantize of {gguf} to {file_type} gave {code}")


def load(model: Path, threads: int) -> LlamaCppPeer:
    """The file as it was downloaded, or as `prepare` has made it."""
    llama = _import()
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    file = model / _MODEL if model.is_dir() else model
    opened = llama.llama_model_load_from_file(str(file).encode(), params)
    if not opened:
        raise RuntimeError(f"llama.cpp could not load {file}")
    return LlamaCppPeer(opened, threads)


def _kind(dtype: str, file_type: str | None) -> PeerKind:
    return PeerKind(
        name=f"llama.cpp-{dtype.replace(' ', '-')}",
        engine="llama.cpp",
        dtype=dtype,
        package="llama_cpp",
        distribution="llama-cpp-python",
        load=load,
        prepare=None if file_type is None else partial(prepare, file_type=file_type),
        reads_gguf=True,
    )


KINDS = (
    _kind("fp32", "ALL_F32"),
    _kind("fp16", "MOSTLY_F16"),
    _kind("q8_0", "MOSTLY_Q8_0"),
    _kind("as stored", None),
)
