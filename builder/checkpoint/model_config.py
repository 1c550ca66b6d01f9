"""The Hugging Face config of a checkpoint: read, checked against what can be exported, and cleaned."""

from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from pop_engine.builder.checkpoint.json_file import read_json_object
from pop_engine.builder.checkpoint.reason import reason
from pop_engine.builder.export.families.registry import vision_family, vision_model_types
from pop_engine.configs.errors import UsageError

CONFIG_NAME = "config.json"
_BAD_VALUES = (ValueError, TypeError, KeyError, AttributeError, OSError, StrictDataclassError)
_STATE_SPACE_FAMILIES = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3",
    "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
})  # fmt: skip
_STATE_SPACE_LAYERS = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid_sliding", "hybrid"}
)


def read_model_config(directory: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a checkpoint folder.

    Raises UsageError where it is missing, of a model that cannot be exported, or would run code from the checkpoint
    without leave; EngineError where it is damaged.
    """
    path = directory / CONFIG_NAME
    content = _read_config(path)
    _refuse_quantized(content, str(path))
    known = content.get("model_type") in CONFIG_MAPPING
    if not known:
        _refuse_unknown(content, path, trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code and not known)
    except (*_BAD_VALUES, ImportError, SyntaxError) as error:
        raise UsageError(
            f"{path}: not a valid config of model_type {content.get('model_type')} ({reason(error)})"
        ) from error
    return _checked(config, str(path))


def config_from_mapping(content: dict[str, Any], origin: str) -> PreTrainedConfig:
    """The config that plain data describes, for a model type known to transformers.

    Raises UsageError, beginning with `origin`, where values are wrong or the model cannot be exported.
    """
    model_type = str(content.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise UsageError(f"{origin}: model_type {model_type!r} is not known to transformers {transformers.__version__}")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(content)
    except _BAD_VALUES as error:
        raise UsageError(f"{origin}: not a valid config of model_type {model_type} ({reason(error)})") from error
    return _checked(config, origin)


def _checked(config: PreTrainedConfig, origin: str) -> PreTrainedConfig:
    _refuse_unsupported(config, origin)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or vision_family(config) is not None:
        # A model class of the checkpoint's own is looked up by this name.
        config.name_or_path = ""
    return config


def _refuse_unknown(content: dict[str, Any], path: Path, *, trust_remote_code: bool) -> None:
    model_type = content.get("model_type")
    if "auto_map" not in content:
        raise UsageError(
            f"{path}: model_type {model_type!r} is not known to transformers {transformers.__version__}; "
            "expected a decoder-only language model that it knows"
        )
    if not trust_remote_code:
        raise UsageError(
            f"{path}: model_type {model_type!r} needs Python code from the checkpoint (auto_map); "
            "read that code, then allow it with --trust-remote-code"
        )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path}: missing; expected a Hugging Face checkpoint folder (config.json and *.safetensors)")
    return read_json_object(path)


def _refuse_quantized(values: dict[str, Any], origin: str) -> None:
    quantization = values.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UsageError(
            f"{origin}: weights quantized with {method!r} cannot be read; use the unquantized checkpoint or a GGUF file"
        )


def _refuse_unsupported(config: PreTrainedConfig, origin: str) -> None:
    family = config.model_type
    if config.is_encoder_decoder:
        raise UsageError(
            f"{origin}: {family} is an encoder-decoder model; prefill-only pruning needs a decoder-only model"
        )
    state_space = _state_space_layers(config)
    if family in _STATE_SPACE_FAMILIES or state_space:
        layers = f" (layers: {', '.join(state_space)})" if state_space else ""
        raise UsageError(
            f"{origin}: {family} has state-space or linear-attention layers{layers}; their state needs every token, "
            "so a tail layer cannot be pruned; use a model whose layers are all attention"
        )
    remote = getattr(config, "auto_map", None) or {}
    is_causal_lm = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote
    if is_causal_lm or vision_family(config) is not None:
        return
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UsageError(
            f"{origin}: {family} takes images in a way that pop-engine does not know; expected a language model, or "
            f"one of {', '.join(vision_model_types())}"
        )
    raise UsageError(
        f"{origin}: transformers {transformers.__version__} has no causal language model class for {family}; "
        "expected a model that AutoModelForCausalLM can load"
    )


def _state_space_layers(config: PreTrainedConfig) -> list[str]:
    text = config.get_text_config()
    names = ("layer_types", "layers_block_type", "block_types")
    kinds = {str(kind) for name in names for kind in getattr(text, name, None) or ()}
    return sorted(kinds & _STATE_SPACE_LAYERS)
