"""Tensors by the model's names, as transformers finds or makes them when it loads a checkpoint.

Experts may be stored one by one, and a model with images under the names of another version.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.big_modeling import init_empty_weights
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pop_engine.builder.checkpoint.checkpoint import StoredTensor
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.builder.export.model import make_model

# Where another tensor has its dtype: it cannot lie in the weight files as it is.
_CONVERTED = "several tensors"


@dataclass(frozen=True)
class ConvertedTensor(StoredTensor):
    """A tensor that is computed from stored ones, given by the pattern of transformers' table that each matched."""

    parts: Mapping[str, Sequence[StoredTensor]]
    converter: Any

    def read(self) -> torch.Tensor:
        """Read the parts and convert them."""
        return _convert(self.converter, {p: [part.read() for part in parts] for p, parts in self.parts.items()})


def with_converted_tensors(tensors: Mapping[str, StoredTensor], config: PretrainedConfig) -> dict[str, StoredTensor]:
    """These tensors, and those that transformers' table for this model makes of them, by the model's names."""
    conversions = _conversions(config)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    found: dict[str, StoredTensor] = dict(tensors)
    parts: dict[tuple[str, int], dict[str, list[StoredTensor]]] = {}
    for stored_name in sorted(tensors, key=_natural_order):
        name = stored_name
        for conversion in conversions:
            if conversion not in converters:
                name = conversion.rename_source_key(name)[0]
        found.setdefault(name, tensors[stored_name])
        for index, converter in enumerate(converters):
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                parts.setdefault((target, index), {}).setdefault(pattern, []).append(tensors[stored_name])
                break
    for (target, index), own_parts in parts.items():
        if target not in tensors and (made := _make(target, converters[index], own_parts)) is not None:
            found[target] = made
    return found


def _conversions(config: PretrainedConfig) -> list[Any]:
    """The table's lines for a causal LM. A class of its own goes before its model type, as in transformers.

    A model with images has lines for each model that it is made of.
    """
    if vision_family(config) is not None:
        with init_empty_weights():
            return list(get_model_conversion_mapping(make_model(config), add_legacy=False))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    names: list[str] = [model_class.__name__] if isinstance(model_class, type) else []
    found = (get_checkpoint_conversion_mapping(name) for name in (*names, config.model_type))
    return next((conversions for conversions in found if conversions is not None), [])


def _make(name: str, converter: Any, parts: dict[str, list[StoredTensor]]) -> ConvertedTensor | None:
    """The converted tensor; None where the conversion needs more than its parts, or not all are there."""
    shapes = {p: [torch.empty(part.shape, device="meta") for part in own] for p, own in parts.items()}
    try:
        shape = tuple(_convert(converter, shapes).shape)
    except Exception:  # Whatever a conversion that was not made for this: the parameter is then reported as missing.
        return None
    first = next(iter(parts.values()))[0]
    num_bytes = sum(part.num_bytes for own in parts.values() for part in own)
    return ConvertedTensor(name, shape, _CONVERTED, first.file, first.offset, num_bytes, parts, converter)


def _convert(converter: Any, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    patterns = converter.source_patterns
    converted: Any = {pattern: tensors[pattern] for pattern in patterns}
    for operation in converter.operations:
        converted = operation.convert(
            converted, source_patterns=patterns, target_patterns=converter.target_patterns, full_layer_name=""
        )
    (tensor,) = converted.values()
    made: torch.Tensor = tensor[0] if isinstance(tensor, list) else tensor
    return made


def _natural_order(name: str) -> list[str | int]:
    """Experts in the order of their numbers: 2 before 10."""
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name)]
