"""A Hugging Face model with shapes and no weights: what the graphs are traced from."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate.big_modeling import init_empty_weights
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pop_engine.builder.export.experts import trace_experts
from pop_engine.builder.export.failure import first_line
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.configs.errors import EngineError, UsageError
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
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return list(module)
    raise UsageError(f"{type(model).__name__}: has no list of {expected} decoder layers to prune")


def lm_head(model: PreTrainedModel) -> nn.Module:
    """What turns hidden states into logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise EngineError(f"{type(model).__name__}: has no LM head of its own")
    return head


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
            intermediate_size=_optional(text, "intermediate_size") or 4 * int(text.hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=_optional(text, "num_key_value_heads") or num_heads,
            head_dim=_optional(text, "head_dim") or int(text.hidden_size) // num_heads,
            vocab_size=int(text.vocab_size),
            max_position_embeddings=int(text.max_position_embeddings),
        )
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"model type {config.model_type}: not a decoder-only transformer that can be pruned ({error})"
        ) from error


def _optional(config: PretrainedConfig, name: str) -> int | None:
    """A number that a config may lack, or have one of per layer: a list, or what raises when it is asked for."""
    try:
        value = getattr(config, name, None)
    except (AttributeError, ValueError, RuntimeError):
        return None
    return max(value) if isinstance(value, list | tuple) else value


def check_takes_positions(model: PreTrainedModel) -> None:
    """Raise EngineError where a model counts its positions itself: a graph's are an input."""
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise EngineError(f"{type(model).__name__}: takes no position_ids, so its positions cannot be a graph's input")


def build_fake_model(config: PretrainedConfig, dtype: DType, attn_implementation: str) -> FakeModel:
    """Instantiate the config's model class without allocating a weight.

    Buffers (rotary frequencies) are real: the graphs hold their values.
    """
    model = _instantiate(config, dtype=TORCH_DTYPES[dtype], attn_implementation=attn_implementation)
    model.eval()
    model.tie_weights()
    trace_experts(model)
    if (family := vision_family(config)) is not None:
        family.adapt(model)
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    names = canonical_names(model)
    _replace_parameters(model, mode, names)
    return FakeModel(model, mode, names)


def brings_code(config: PretrainedConfig) -> bool:
    """Whether the model class is the checkpoint's own. Its config class is then too, so leave has been given."""
    return type(config).__module__.startswith("transformers_modules.")


def make_model(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """The config's causal LM, or the model with images that a language model is part of."""
    own_code = brings_code(config)
    options |= {"trust_remote_code": own_code}
    model: PreTrainedModel
    if own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)
    else:
        model = AutoModelForImageTextToText.from_config(copy.deepcopy(config), **options)
    return model


def _instantiate(config: PretrainedConfig, **options: object) -> PreTrainedModel:
    """The config's model on the meta device. Raises EngineError where its class does not allow it."""
    try:
        with init_empty_weights(include_buffers=False):
            model = make_model(config, **options)
    except Exception as error:
        raise EngineError(
            f"model type {config.model_type}: cannot be made from its config, or has attention of its own instead of "
            f"transformers' attention interface ({first_line(error)})"
        ) from error
    return model


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's parameters under their canonical names, in the model's order."""
    model = _instantiate(config)
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


def add_parameters(fake: FakeModel, shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> dict[str, nn.Parameter]:
    """Fake parameters that the model class does not have; their names are canonical."""
    with fake.mode:
        tensors = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype]) for name, shape in shapes.items()}
    fake.canonical_names.update({name: name for name in shapes})
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}


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
