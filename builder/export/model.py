"""A Hugging Face model with shapes and no weights: what the graphs are traced from."""

import copy
from dataclasses import dataclass

import torch
from accelerate.big_modeling import init_empty_weights
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import KVShape
from pop_engine.configs.manifest import DType
from pop_engine.configs.model_dims import ModelDims

TORCH_DTYPES: dict[DType, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class FakeModel:
    """A model whose parameters are fake and whose buffers are real, ready for torch.export.

    `canonical_names` maps every parameter's name to the first name of the tensor it shares: tied embeddings have
    two names and one tensor.
    """

    model: PreTrainedModel
    mode: FakeTensorMode
    canonical_names: dict[str, str]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The stack of decoder layers. Raises UsageError where the model has none of the length its config says."""
    expected = text_config(model.config).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return list(module)
    raise UsageError(f"{type(model).__name__}: has no list of {expected} decoder layers to prune")


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of a config that describes the decoder."""
    decoder: PretrainedConfig = config.get_text_config(decoder=True)
    return decoder


def model_dims(config: PretrainedConfig) -> ModelDims:
    """A config's dimensions. Raises UsageError where it does not describe a decoder-only transformer."""
    text = text_config(config)
    try:
        num_heads = int(text.num_attention_heads)
        return ModelDims(
            model_type=str(config.model_type),
            num_hidden_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or num_heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // num_heads),
            vocab_size=int(text.vocab_size),
            max_position_embeddings=int(text.max_position_embeddings),
        )
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"model type {config.model_type}: not a decoder-only transformer that can be pruned ({error})"
        ) from error


def kv_shapes(dims: ModelDims) -> tuple[KVShape, ...]:
    """What each layer's cache holds per token."""
    return (KVShape(dims.num_key_value_heads, dims.head_dim),) * dims.num_hidden_layers


def build_fake_model(config: PretrainedConfig, dtype: DType, attn_implementation: str) -> FakeModel:
    """Instantiate the config's causal LM class without allocating a weight.

    Buffers (rotary frequencies) are real: the graphs hold their values.
    """
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=TORCH_DTYPES[dtype], attn_implementation=attn_implementation
        )
    model.eval()
    model.tie_weights()
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    names = canonical_names(model)
    _replace_parameters(model, mode, names)
    return FakeModel(model, mode, names)


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters under their canonical names, in the model's order."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: shapes[name] for name in dict.fromkeys(canonical_names(model).values())}


def canonical_names(model: PreTrainedModel) -> dict[str, str]:
    """Every parameter's name to the name that its tensor goes by.

    On the meta device tied parameters need not be one object, so the model class's own table of ties decides too.
    """
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    ties = model.all_tied_weights_keys if getattr(model.config, "tie_word_embeddings", False) else {}
    return {name: names.get(ties.get(name, name), name) for name in names}


def _replace_parameters(model: PreTrainedModel, mode: FakeTensorMode, names: dict[str, str]) -> None:
    fakes: dict[str, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            name = names[f"{prefix}.{key}" if prefix else key]
            if name not in fakes:
                with mode:
                    fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                fakes[name] = nn.Parameter(fake, requires_grad=False)
            module._parameters[key] = fakes[name]
