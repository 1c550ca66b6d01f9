"""What each layer writes into its cache per token, seen by running the model once without weights."""

import torch
from torch._subclasses import FakeTensorMode
from transformers import PretrainedConfig

from pop_engine.builder.export.attention import IMPLEMENTATION, register_attention
from pop_engine.builder.export.cache import RecordingCache, RecordingLayer
from pop_engine.builder.export.failure import first_line
from pop_engine.builder.export.mask import CausalMask, UnsupportedMask
from pop_engine.builder.export.model import build_fake_model, check_takes_positions, text_config
from pop_engine.builder.export.rotary import hold_rotary
from pop_engine.configs.errors import EngineError, PopError
from pop_engine.configs.io_contract import KVShape
from pop_engine.configs.manifest import DType

_NUM_ROWS = 3


def observe_kv_shapes(config: PretrainedConfig, dtype: DType, max_seq_len: int) -> tuple[KVShape, ...]:
    """One shape a layer. Configs say it in many ways, and some layers differ from their config.

    Raises UsageError or EngineError, both with the model class's name, where the model cannot be exported: what it
    does that a graph cannot hold shows here, before any work.
    """
    cache = RecordingCache(text_config(config).num_hidden_layers)
    register_attention(cache)
    fake = build_fake_model(config, dtype, IMPLEMENTATION)
    name = type(fake.model).__name__
    check_takes_positions(fake.model)
    hold_rotary(fake.model, max_seq_len)
    try:
        _run(fake.model, fake.mode, cache)
        return tuple(_kv_shape(layer, layer_idx) for layer_idx, layer in enumerate(cache.recording))
    except PopError as error:
        raise type(error)(f"{name}: {error}") from error
    except Exception as error:
        # The model has tried to compute with what stands for its mask.
        own_mask = any(kind.__name__ in str(error) for kind in (CausalMask, UnsupportedMask))
        reason = "it computes with its attention mask, which a graph does not have" if own_mask else first_line(error)
        raise EngineError(f"{name}: cannot be traced with a cache of ours ({reason})") from error


def _run(model: torch.nn.Module, mode: FakeTensorMode, cache: RecordingCache) -> None:
    with mode, torch.no_grad(), cache.holding_back():
        tokens = torch.zeros((2, _NUM_ROWS), dtype=torch.int64)
        model(input_ids=tokens, position_ids=tokens, cache=cache, use_cache=True)


def _kv_shape(layer: RecordingLayer, layer_idx: int) -> KVShape:
    if layer.held_back is None:
        raise EngineError(
            f"layer {layer_idx} writes no K and V of its own; only models whose layers all do can be exported"
        )
    key, value = layer.held_back
    if key.shape != value.shape or key.ndim != 4 or key.shape[2] != _NUM_ROWS:
        raise EngineError(
            f"layer {layer_idx} caches K as {list(key.shape)} and V as {list(value.shape)} for {_NUM_ROWS} tokens; "
            "only K and V heads of one size, a row per token, can be exported"
        )
    return KVShape(int(key.shape[1]), int(key.shape[3]))
