"""The attention that a model is traced with: one operator, registered with transformers like any other backend."""

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from pop_engine.builder.export.cache import RecordingCache
from pop_engine.builder.export.mask import CausalMask, Mask, UnsupportedMask, describe_mask
from pop_engine.configs.errors import EngineError
from pop_engine.plugins import attention as attention_op

IMPLEMENTATION = "pop_engine"


def register_attention(cache: RecordingCache) -> None:
    """Make `attn_implementation="pop_engine"` mean: attend to what `cache` has recorded. Replaces the last one."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Mask | torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Query [B, H, rows, D] against the recorded cache; returns [B, rows, H, D] as transformers expects."""
        batch, num_heads, rows, head_dim = query.shape
        window = _window(module, attention_mask, sliding_window)
        if cache.recording[0].holds_back:
            # Context rows end at the cache write; what follows is dead code and leaves with the dead code.
            return query.new_empty(batch, rows, num_heads, value.shape[-1]), None
        assert cache.total_len is not None
        output = torch.onnx.ops.symbolic(
            f"{attention_op.DOMAIN}::{attention_op.OP_TYPE}",
            _without_trailing_none(query, key, value, cache.total_len, s_aux, cache.image_ids),
            {
                "scale": float(head_dim**-0.5 if scaling is None else scaling),
                "sliding_window": window,
                "softcap": float(softcap or 0.0),
            },
            dtype=query.dtype,
            shape=(batch, rows, num_heads, value.shape[-1]),
            version=attention_op.VERSION,
        )
        return output, None

    AttentionInterface.register(IMPLEMENTATION, attend)
    AttentionMaskInterface.register(IMPLEMENTATION, describe_mask)


def _without_trailing_none(*inputs: torch.Tensor | None) -> list[torch.Tensor | None]:
    last = max(place for place, given in enumerate(inputs) if given is not None)
    return list(inputs[: last + 1])


def _window(module: torch.nn.Module, mask: Mask | torch.Tensor | None, sliding_window: int | None) -> int:
    """The window that a layer sees. The mask decides, as in transformers: its attentions only hint at a window."""
    name = type(module).__name__
    if isinstance(mask, CausalMask):
        return mask.sliding_window
    if isinstance(mask, UnsupportedMask):
        raise EngineError(f"{name}: {mask.reason}")
    if mask is not None:
        raise EngineError(f"{name}: attention with a mask or a position bias of its own cannot be exported")
    if sliding_window or not getattr(module, "is_causal", True):
        raise EngineError(f"{name}: attention without a mask that says what it sees cannot be exported")
    return 0
