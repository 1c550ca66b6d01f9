"""Which family a config is of."""

from transformers import PretrainedConfig

from pop_engine.builder.export.families.gemma3 import Gemma3
from pop_engine.builder.export.families.internvl import InternVL
from pop_engine.builder.export.families.qwen3_vl import Qwen3VL
from pop_engine.builder.export.families.vision_family import VisionFamily

_ALL: tuple[VisionFamily, ...] = (Gemma3(), InternVL(), Qwen3VL())
_FAMILIES = {family.model_type: family for family in _ALL}


def vision_family(config: PretrainedConfig) -> VisionFamily | None:
    """The family of a model that takes images, or None where it takes text alone."""
    return _FAMILIES.get(config.model_type)


def vision_model_types() -> tuple[str, ...]:
    """The model types of all families that take images."""
    return tuple(sorted(_FAMILIES))
