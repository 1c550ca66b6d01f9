"""Rotary embeddings whose frequencies depend on the length of the call: held at those of short sequences."""

from torch import nn
from transformers import PretrainedConfig

from pop_engine.configs.errors import UsageError

# What transformers calls the kinds that switch, and a name that it does not know: no update, same frequencies.
_SWITCHING = ("dynamic", "longrope")
_HELD = "held"


def hold_rotary(model: nn.Module, max_seq_len: int) -> None:
    """Freeze the frequencies of dynamic and longrope scaling, which change once a sequence passes a threshold.

    Keys that are cached by then would keep the old ones, chunk by chunk another, so a sequence may not pass it.
    Raises UsageError where `max_seq_len` would let it.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            for layer_type, own_kind in kind.items():
                kind[layer_type] = _held(module, str(own_kind), layer_type, max_seq_len)
        elif kind is not None:
            module.rope_type = _held(module, str(kind), None, max_seq_len)  # type: ignore[assignment]


def _held(module: nn.Module, kind: str, layer_type: str | None, max_seq_len: int) -> str:
    if not any(switching in kind for switching in _SWITCHING):
        return kind
    threshold = _threshold(module, kind, layer_type)
    if max_seq_len > threshold:
        raise UsageError(
            f"--max-seq-len {max_seq_len}: {kind} rotary scaling changes beyond {threshold} tokens, "
            f"which a KV cache cannot follow; give {threshold} or less"
        )
    return _HELD


def _threshold(module: nn.Module, kind: str, layer_type: str | None) -> int:
    config = module.config
    assert isinstance(config, PretrainedConfig)
    if kind == "longrope":
        parameters = config.rope_parameters
        return int((parameters[layer_type] if layer_type else parameters)["original_max_position_embeddings"])
    return int(config.max_position_embeddings)
