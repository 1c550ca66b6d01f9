"""The cache that a model is traced with: it records where K and V are written, and computes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pop_engine.plugins import kv_cache_update


class RecordingLayer(CacheLayerMixin):
    """One decoder layer's K and V. `keys` and `values` are [B, H_kv, max_seq_len, D], once the layer has written.

    `held_back` is what it last wrote while held back.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._past: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cache_len: torch.Tensor | None = None
        self.held_back: tuple[torch.Tensor, torch.Tensor] | None = None
        self.holds_back = False

    def begin(self, past_key: torch.Tensor, past_value: torch.Tensor, cache_len: torch.Tensor) -> None:
        """Start a trace from these graph inputs."""
        self.keys = self.values = self.held_back = None
        self._past, self._cache_len = (past_key, past_value), cache_len

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the write of new rows [B, H_kv, rows, D] and return the whole cache.

        While held back the rows are only kept, and the next write puts them before its own: a cache tensor is
        written once per call of the graph (TensorRT allows no more).
        """
        if self.holds_back:
            self.held_back = (key_states, value_states)
            return key_states, value_states
        assert self._past is not None
        assert self.keys is None, "a layer wrote its cache twice"
        context_key, context_value = self.held_back or (None, None)
        self.keys = self._record(self._past[0], context_key, key_states)
        self.values = self._record(self._past[1], context_value, value_states)
        return self.keys, self.values

    def _record(self, past: torch.Tensor, context: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        assert self._cache_len is not None
        pieces = (rows,) if context is None else (context, rows)
        written: torch.Tensor = torch.onnx.ops.symbolic(
            f"{kv_cache_update.DOMAIN}::{kv_cache_update.OP_TYPE}",
            (past, self._cache_len, *pieces),
            dtype=past.dtype,
            shape=past.shape,
            version=kv_cache_update.VERSION,
        )
        return written

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate: the caches are graph inputs."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is made: causality and lengths are part of the attention operator."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Unused: positions are a graph input."""
        return 0

    def get_max_length(self) -> int:
        """Undefined while tracing."""
        return -1


class RecordingCache(Cache):
    """One RecordingLayer per decoder layer, and what all layers' attention takes beside them.

    `total_len` [B] is the number of valid keys after this call, `image_ids` [B, rows] the images of its rows where
    their tokens see each other.
    """

    def __init__(self, num_hidden_layers: int) -> None:
        self.recording = [RecordingLayer() for _ in range(num_hidden_layers)]
        super().__init__(layers=list(self.recording))
        self.total_len: torch.Tensor | None = None
        self.image_ids: torch.Tensor | None = None

    def begin(
        self,
        past: Sequence[tuple[torch.Tensor, torch.Tensor]],
        cache_len: torch.Tensor,
        new_len: int | torch.SymInt,
        image_ids: torch.Tensor | None = None,
    ) -> None:
        """Start a trace. `past` is K and V per layer, `cache_len` [B], `new_len` the rows of this call."""
        for layer, (past_key, past_value) in zip(self.recording, past, strict=True):
            layer.begin(past_key, past_value, cache_len)
        total_len: torch.Tensor = cache_len + new_len  # type: ignore[assignment]
        self.total_len, self.image_ids = total_len, image_ids

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Within it, layers keep their rows for the next write instead of writing."""
        for layer in self.recording:
            layer.holds_back = True
        try:
            yield
        finally:
            for layer in self.recording:
                layer.holds_back = False

    def presents(self) -> list[torch.Tensor]:
        """The updated caches, K and V by turns, layer after layer."""
        presents: list[torch.Tensor] = []
        for layer in self.recording:
            assert layer.keys is not None
            assert layer.values is not None
            presents += [layer.keys, layer.values]
        return presents
