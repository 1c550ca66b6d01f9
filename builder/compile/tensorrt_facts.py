"""What a network is, read back from it: the facts that the manifest records and the check compares."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from pop_engine.builder.compile.tensorrt_network import Network
from pop_engine.configs.io_contract import Binding, GraphContract
from pop_engine.configs.plan_record import AttentionRecord, CausalKind, ConstantRecord, WeightsInside

_CAUSAL_KINDS: dict[str, CausalKind] = {"NONE": "none", "UPPER_LEFT": "upper-left", "LOWER_RIGHT": "lower-right"}
_DTYPES = {
    "FLOAT": ("fp32", 4),
    "HALF": ("fp16", 2),
    "BF16": ("bf16", 2),
    "INT64": ("int64", 8),
    "INT32": ("int32", 4),
    "BOOL": ("bool", 1),
}


def read_contract(network: Network, declared: GraphContract) -> GraphContract:
    """The network's bindings; an alias is the input that a cache update writes to.

    TensorRT keeps no names of dynamic dimensions, so those come from `declared`, where it says dynamic too. Whatever
    `declared` knows as a weight is one.
    """
    shapes = {b.name: b.shape for b in (*declared.inputs, *declared.outputs, *declared.weights)}
    weights = {binding.name for binding in declared.weights}
    aliases = {update.get_output(0).name: update.get_input(0).name for update in network.cache_updates()}
    inputs = [_binding(tensor, shapes) for tensor in network.inputs()]
    return GraphContract(
        inputs=tuple(binding for binding in inputs if binding.name not in weights),
        outputs=tuple(_binding(tensor, shapes, aliases.get(tensor.name)) for tensor in network.outputs()),
        weights=tuple(binding for binding in inputs if binding.name in weights),
    )


def read_attentions(network: Network) -> tuple[AttentionRecord, ...]:
    """Every attention's settings."""
    return tuple(
        AttentionRecord(
            attention.name,
            _CAUSAL_KINDS[attention.causal_kind.name],
            _name(attention.key_value_lengths),
            _name(attention.mask),
        )
        for attention in network.attentions()
    )


def read_constants(network: Network) -> tuple[ConstantRecord, ...]:
    """What stays inside the plan, whether as data or to compute shapes, but for the weights."""
    return tuple(record for record in _used_constants(network) if record.name not in network.weights)


def read_weights_inside(network: Network) -> WeightsInside:
    """The parameters among the constants."""
    found = [record for record in _used_constants(network) if record.name in network.weights]
    return WeightsInside(len(found), sum(record.num_bytes for record in found))


def used_weights(network: Network) -> frozenset[str]:
    """Names of the parameters that are constants of the network and that some output depends on."""
    return frozenset(record.name for record in _used_constants(network)) & network.weights.keys()


def _used_constants(network: Network) -> list[ConstantRecord]:
    """What no output depends on is not in the plan."""
    used = used_tensors(network)
    constants = (layer for layer in network.layers() if layer.type == network.trt.LayerType.CONSTANT)
    return [_constant(layer) for layer in constants if layer.get_output(0).name in used]


def used_tensors(network: Network) -> frozenset[str]:
    """Names of all tensors that some output depends on."""
    makers = {layer.get_output(idx).name: layer for layer in network.layers() for idx in range(layer.num_outputs)}
    used: set[str] = set()
    waiting = [tensor.name for tensor in network.outputs()]
    while waiting:
        name = waiting.pop()
        if name in used:
            continue
        used.add(name)
        if name in makers:
            waiting += [tensor.name for tensor in _layer_inputs(makers[name])]
    return frozenset(used)


def _layer_inputs(layer: Any) -> Iterable[Any]:
    given = (layer.get_input(idx) for idx in range(layer.num_inputs))
    return (tensor for tensor in given if tensor is not None)


def _name(tensor: Any) -> str | None:
    return None if tensor is None else str(tensor.name)


def _binding(tensor: Any, declared: Mapping[str, tuple[int | str, ...]], alias: str | None = None) -> Binding:
    known = declared.get(tensor.name, ())
    shape: list[int | str] = []
    for axis, size in enumerate(tensor.shape):
        dim = known[axis] if axis < len(known) else None
        shape.append(int(size) if size >= 0 else dim if isinstance(dim, str) else "?")
    return Binding(tensor.name, tuple(shape), _DTYPES[tensor.dtype.name][0], alias)


def _constant(layer: Any) -> ConstantRecord:
    tensor = layer.get_output(0)
    dtype, item_bytes = _DTYPES[tensor.dtype.name]
    shape = tuple(int(dim) for dim in tensor.shape)
    return ConstantRecord(layer.name, shape, dtype, prod(shape) * item_bytes)
