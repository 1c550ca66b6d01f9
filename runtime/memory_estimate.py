"""What an engine will take of memory, before anything is loaded, and which limit to lower where that is too much."""

from dataclasses import dataclass, replace
from pathlib import Path

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Limits, Manifest
from pop_engine.configs.model_dims import ModelDims

_ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by use. `slot_bytes` is the cache of one sequence of max_seq_len tokens, `num_slots` how many are held."""

    weights_bytes: int
    slot_bytes: int
    num_slots: int
    activation_bytes: int
    limits: Limits

    @property
    def cache_bytes(self) -> int:
        """The KV cache."""
        return self.slot_bytes * self.num_slots

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.cache_bytes + self.activation_bytes

    def with_activations(self, num_bytes: int) -> "MemoryEstimate":
        """The same estimate once a compiled plan has said what it takes."""
        return replace(self, activation_bytes=num_bytes)

    def check(self, free_bytes: int, where: str) -> None:
        """Raise EngineError where it is more than is free; `where` names the memory, like `GPU 0`."""
        if self.total_bytes <= free_bytes:
            return
        raise EngineError(
            f"{where}: {_gigabytes(free_bytes)} are free, but the engine takes {_gigabytes(self.weights_bytes)} of "
            f"weights, {_gigabytes(self.cache_bytes)} of cache ({self.num_slots} x {self.limits.max_seq_len} tokens) "
            f"and {_gigabytes(self.activation_bytes)} of activations; {self._advice(free_bytes)}"
        )

    def _advice(self, free_bytes: int) -> str:
        """The limit whose lowering is enough, slots first: they cost nobody's prompt anything."""
        room = free_bytes - self.weights_bytes - self.activation_bytes
        if room >= self.slot_bytes:
            return f"build with --max-batch-size {room // self.slot_bytes}"
        max_seq_len = room * self.limits.max_seq_len // self.slot_bytes
        if max_seq_len > 0:
            fewer = "--max-batch-size 1 and " if self.num_slots > 1 else ""
            return f"build with {fewer}--max-seq-len {max_seq_len}"
        if free_bytes > self.weights_bytes:
            return f"build with a --max-prefill-len below {self.limits.max_prefill_len} and a lower --max-seq-len"
        return "free some, or use more: the weights alone do not fit"


def device_estimate(manifest: Manifest, *, num_rows: int) -> MemoryEstimate:
    """What an engine takes on a GPU, where the whole cache is allocated at once. Calls have `num_rows` rows at most."""
    assert manifest.weights is not None, "weights_directory comes first"
    return MemoryEstimate(
        weights_bytes=manifest.weights.num_bytes,
        slot_bytes=_slot_bytes(manifest),
        num_slots=manifest.limits.max_batch_size,
        activation_bytes=_activation_bytes(manifest.dims, manifest.cache.dtype, num_rows),
        limits=manifest.limits,
    )


def host_estimate(manifest: Manifest) -> MemoryEstimate:
    """What an engine takes at least on the CPU: its cache grows page by page, so one full slot is counted.

    The two-step form holds a second packed copy of the weights.
    """
    assert manifest.weights is not None, "weights_directory comes first"
    copies = 1 if manifest.target.decode_with == "prefill" else 2
    return MemoryEstimate(
        weights_bytes=copies * manifest.weights.num_bytes,
        slot_bytes=_slot_bytes(manifest),
        num_slots=1,
        activation_bytes=_activation_bytes(manifest.dims, manifest.cache.dtype, manifest.limits.max_prefill_len),
        limits=manifest.limits,
    )


def free_host_bytes() -> int | None:
    """Memory that this machine can still give without swapping; None where the system does not say."""
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def check_host_memory(manifest: Manifest) -> None:
    """Raise EngineError where the weights and one full slot do not fit into what is free."""
    free_bytes = free_host_bytes()
    if free_bytes is not None:
        host_estimate(manifest).check(free_bytes, "memory")


def _slot_bytes(manifest: Manifest) -> int:
    cache = manifest.cache
    return cache.bytes_per_token(_ITEM_BYTES[cache.dtype]) * cache.max_seq_len


def _activation_bytes(dims: ModelDims, dtype: str, num_rows: int) -> int:
    """Roughly what one layer of one call holds at once: the residual, Q, K and V, the MLP's two halves, the logits."""
    heads = (dims.num_attention_heads + 2 * dims.num_key_value_heads) * dims.head_dim
    per_row = 3 * dims.hidden_size + heads + 2 * dims.intermediate_size
    return num_rows * per_row * _ITEM_BYTES[dtype] + dims.vocab_size * 4


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
