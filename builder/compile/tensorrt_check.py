"""Is the wired network still the graph? What the parser loses changes no shape, so nothing else would notice."""

from collections.abc import Iterator, Sequence
from typing import Any

from pop_engine.builder.compile.tensorrt_facts import read_attentions, read_contract, used_tensors, used_weights
from pop_engine.builder.compile.tensorrt_network import Network
from pop_engine.builder.passes.expose_lengths import ExpectedAttention
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding, GraphContract


def check_network(network: Network, contract: GraphContract, expected: Sequence[ExpectedAttention], name: str) -> None:
    """Raise EngineError, naming the graph and the first thing that is wrong."""
    for fault in (
        *_attention_faults(network, expected),
        *_cache_faults(network, contract),
        *_unused_inputs(network),
        *_binding_faults(network, contract),
        *(f"weight {name} is lost" for name in sorted(network.weights.keys() - used_weights(network))),
    ):
        raise EngineError(f"{name}: {fault}; TensorRT {network.trt.__version__} would compute something else")


def _attention_faults(network: Network, expected: Sequence[ExpectedAttention]) -> Iterator[str]:
    records = {record.name: record for record in read_attentions(network)}
    layers = {attention.name: attention for attention in network.attentions()}
    for expectation in expected:
        record = records.get(expectation.name)
        if record is None:
            yield f"{expectation.name} is missing"
            continue
        if record.lengths != expectation.lengths:
            yield f"{record.name} has lost the lengths of its keys (found {record.lengths})"
        if record.mask != expectation.mask:
            yield f"{record.name} has lost the mask of its window (found {record.mask})"
        causal = "none" if expectation.mask else "lower-right"
        if record.causal != causal:
            yield f"{record.name} is causal {record.causal}, expected {causal}"
        reads = tuple(layers[record.name].get_input(idx).name for idx in range(3))
        if reads != (expectation.query, expectation.key, expectation.value):
            yield f"{record.name} reads {', '.join(reads)} instead of its query and its cache"
    extra = records.keys() - {expectation.name for expectation in expected}
    if extra:
        yield f"{min(extra)} is not an attention of the graph"


def _cache_faults(network: Network, contract: GraphContract) -> Iterator[str]:
    """Each declared alias is a cache update from that input to that output, and there are no other updates."""
    declared = {binding.name: binding.alias for binding in contract.outputs if binding.alias is not None}
    found: dict[str, Any] = {update.get_output(0).name: update for update in network.cache_updates()}
    for output, alias in declared.items():
        update = found.pop(output, None)
        if update is None:
            yield f"{output} is not written by a cache update, so it does not share the buffer of {alias}"
            continue
        cache = update.get_input(0)
        if cache.name != alias or not cache.is_network_input or not update.get_output(0).is_network_output:
            yield f"{output} is written to {cache.name}, expected {alias}, from input to output"
    if found:
        yield f"{min(found)} is a cache update that no output declares"


def _unused_inputs(network: Network) -> Iterator[str]:
    used = used_tensors(network)
    for tensor in network.inputs():
        if tensor.name not in used:
            yield f"no output depends on input {tensor.name}"


def _binding_faults(network: Network, contract: GraphContract) -> Iterator[str]:
    found = read_contract(network, contract)
    for kind in ("inputs", "weights", "outputs"):
        pairs: tuple[tuple[Binding, ...], tuple[Binding, ...]] = (getattr(contract, kind), getattr(found, kind))
        declared, read = ({binding.name: binding for binding in bindings} for bindings in pairs)
        if declared != read:
            names = [name for name in {**declared, **read} if declared.get(name) != read.get(name)]
            yield f"{kind}: {read.get(names[0])} found, {declared.get(names[0])} declared"
