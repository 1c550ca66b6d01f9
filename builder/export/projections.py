"""The K and V projections of a model's tail layers: where calibration reads, and what it replaces."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from pop_engine.builder.export.model import decoder_layers
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan

_KEY, _VALUE = "k_proj", "v_proj"
_FUSED = frozenset({"qkv_proj", "c_attn", "query_key_value", "Wqkv", "wqkv", "qkv", "kv_proj", "attn_qkv"})


@dataclass(frozen=True)
class KeyValueProjections:
    """One layer's two projections. Their names are those of their modules in the model."""

    layer_idx: int
    key: nn.Linear
    value: nn.Linear
    key_name: str
    value_name: str

    def named(self) -> tuple[tuple[str, nn.Linear], tuple[str, nn.Linear]]:
        """Key, then value, each with its name."""
        return (self.key_name, self.key), (self.value_name, self.value)


def tail_projections(model: PreTrainedModel, plan: PrunePlan) -> list[KeyValueProjections]:
    """The projections of every tail layer, in order.

    Raises UsageError where a layer has no K and V projection of its own, or its input is of another size.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers = decoder_layers(model)
    tail = [_projections_of(layers[layer_idx], layer_idx, names, type(model).__name__) for layer_idx in plan.tail]
    widths = {projection.in_features for layer in tail for _, projection in layer.named()}
    if len(widths) > 1:
        raise UsageError(f"{type(model).__name__}: its tail layers read states of sizes {sorted(widths)}; {_FIX}")
    return tail


_FIX = "its tail cannot be calibrated, so build without calibration"


def _projections_of(layer: nn.Module, layer_idx: int, names: dict[int, str], class_name: str) -> KeyValueProjections:
    parts = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
    key, value = parts.get(_KEY), parts.get(_VALUE)
    if not isinstance(key, nn.Linear) or not isinstance(value, nn.Linear):
        fused = sorted(_FUSED & parts.keys())
        found = f"come from one fused projection ({fused[0]})" if fused else f"are not two projections {_KEY}, {_VALUE}"
        raise UsageError(f"{class_name}: keys and values of layer {layer_idx} {found}; {_FIX}")
    return KeyValueProjections(layer_idx, key, value, names[id(key)], names[id(value)])
