"""Hugging Face transformers on PyTorch, eager and compiled."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pop_engine.tools.bench.peers.kind import PeerKind
from pop_engine.tools.bench.subject import Prompts


class TransformersPeer:
    """The model class itself, without `generate` around it: no more than a forward pass and an argmax a step.

    Compiled, both prefill and decode are, each for its shape, over a static cache as transformers recommends.
    """

    def __init__(self, model: Any, *, compiled: bool) -> None:
        import torch

        self._model = model
        self._compiled = compiled
        self._forward = torch.compile(model, dynamic=False) if compiled else model
        self._static_caches: dict[tuple[int, int], Any] = {}
        self._cache: Any = None
        self._length = 0

    def reserve(self, batch_size: int, max_len: int) -> None:
        """A new cache; compiled, the same one again for the same size, as code is compiled for a cache's memory."""
        from transformers import DynamicCache, StaticCache

        if not self._compiled:
            self._cache = DynamicCache(config=self._model.config)
        else:
            size = (batch_size, max_len)
            if size not in self._static_caches:
                self._static_caches[size] = StaticCache(self._model.config, max_cache_len=max_len)
            self._cache = self._static_caches[size]
            self._cache.reset()
        self._length = 0

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """All prompts in one forward pass, logits of their last tokens alone."""
        yield from self._step(prompts)

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """One forward pass."""
        return self._step([[token] for token in token_ids])

    def _step(self, rows: Prompts) -> list[int]:
        import torch

        with torch.no_grad():
            input_ids = torch.tensor(rows)
            num_tokens = input_ids.shape[1]
            positions = torch.arange(self._length, self._length + num_tokens)[None]
            logits = self._forward(
                input_ids=input_ids,
                position_ids=positions,
                cache=self._cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            self._length += num_tokens
            found: list[int] = logits[:, -1].argmax(-1).tolist()
        return found


def load(folder: Path, threads: int, *, dtype: str, compiled: bool) -> TransformersPeer:
    """The checkpoint in its own class."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
    if compiled:
        # In this process, which stands still while others work; a pool of compilers would not.
        torch._inductor.config.compile_threads = 1
        _allow_many_shapes(torch._dynamo.config)
    return TransformersPeer(model.eval(), compiled=compiled)


def _allow_many_shapes(config: Any) -> None:
    """Each prompt length is compiled for itself; by default compiling stops, silently, after eight."""
    config.recompile_limit = 64


def _kind(form: str, dtype: str, torch_dtype: str) -> PeerKind:
    return PeerKind(
        name=f"transformers-{form}-{dtype}",
        engine=f"transformers {form}",
        dtype=dtype,
        package="transformers",
        distribution="transformers",
        load=partial(load, dtype=torch_dtype, compiled=form == "compiled"),
    )


KINDS = (
    _kind("eager", "fp32", "float32"),
    _kind("eager", "bf16", "bfloat16"),
    _kind("compiled", "fp32", "float32"),
)
