"""The KV cache on the GPU: one block, every tensor a pool with a row per slot."""

from math import prod

from pop_engine.configs.io_contract import CacheShape, past_key, past_value
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions.device import Device
from pop_engine.runtime.sessions.device_memory import DeviceBlock, offsets, total_bytes
from pop_engine.runtime.sessions.device_types import ITEM_BYTES


class DeviceCache:
    """Pools `[num_slots, num_key_value_heads, max_seq_len, head_dim]` by the names of the inputs they are bound to.

    All zeros at first: masked keys get the weight 0, and 0 times what an allocation happens to hold may be NaN.
    """

    def __init__(self, device: Device, cache: CacheShape, num_slots: int) -> None:
        self._slot_bytes: dict[str, int] = {}
        for layer_idx, kv in enumerate(cache.layers):
            slot_bytes = prod((kv.num_key_value_heads, cache.max_seq_len, kv.head_dim)) * ITEM_BYTES[cache.dtype]
            self._slot_bytes |= {past_key(layer_idx): slot_bytes, past_value(layer_idx): slot_bytes}
        sizes = {name: num_slots * slot_bytes for name, slot_bytes in self._slot_bytes.items()}
        self._offsets = offsets(sizes)
        self._block = DeviceBlock(device, total_bytes(sizes.values()))
        self._block.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._slot_bytes

    def address(self, name: str, slots: SlotRange) -> int:
        """Where these slots' rows of one cache tensor begin. A range of slots is contiguous."""
        return self._block.address + self._offsets[name] + slots.first * self._slot_bytes[name]

    def close(self) -> None:
        """Free it."""
        self._block.close()
