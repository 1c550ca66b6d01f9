"""A lowered graph as a TensorRT network: parsed, then wired where the parser loses what the graph says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from pop_engine.builder.compile.tensorrt_module import Messages, Module
from pop_engine.builder.passes.expose_lengths import ExpectedAttention, ExposeLengths
from pop_engine.configs.errors import EngineError


@dataclass(frozen=True)
class Network:
    """A network definition, the module it belongs to, and what has to stay alive as long as it does."""

    trt: Module
    messages: Messages
    builder: Any
    definition: Any

    def layers(self) -> Iterator[Any]:
        """Every layer, as TensorRT's base class."""
        return (self.definition.get_layer(idx) for idx in range(self.definition.num_layers))

    def inputs(self) -> list[Any]:
        """The input tensors."""
        return [self.definition.get_input(idx) for idx in range(self.definition.num_inputs)]

    def outputs(self) -> list[Any]:
        """The output tensors."""
        return [self.definition.get_output(idx) for idx in range(self.definition.num_outputs)]

    def attentions(self) -> Iterator[Any]:
        """Every attention. It hides behind the layer that marks its inputs, under a type that has to be put on it."""
        for layer in self.layers():
            if layer.type == self.trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = self.trt.IAttentionInputLayer
                yield layer.attention

    def cache_updates(self) -> Iterator[Any]:
        """Every cache update."""
        for layer in self.layers():
            if layer.type == self.trt.LayerType.KV_CACHE_UPDATE:
                layer.__class__ = self.trt.IKVCacheUpdateLayer
                yield layer


def make_network(trt: Module, model: ir.Model, name: str) -> tuple[Network, tuple[ExpectedAttention, ...]]:
    """Parse a lowered graph and wire it. Also returns what the attentions were in the graph; `model` is used up.

    Raises EngineError where TensorRT refuses the graph, naming it `name`.
    """
    expose = ExposeLengths()
    expose(model)
    network = _parse(trt, ir.to_proto(model).SerializeToString(), name)
    wire_attentions(network, expose.expected)
    return network, expose.expected


def wire_attentions(network: Network, expected: Sequence[ExpectedAttention]) -> None:
    """Give every attention its lengths, and its causality from the last key back where no mask says it.

    Raises EngineError where an attention of the graph is not in the network.
    """
    lengths = {tensor.name: tensor for tensor in network.outputs()}
    found = {attention.name: attention for attention in network.attentions()}
    for expectation in expected:
        if expectation.name not in found:
            raise EngineError(f"{expectation.name}: TensorRT's parser lost it")
        attention = found[expectation.name]
        attention.key_value_lengths = lengths[expectation.lengths]
        if expectation.mask is None:
            attention.causal_kind = network.trt.CausalMaskKind.LOWER_RIGHT
    for name in {expectation.lengths for expectation in expected}:
        network.definition.unmark_output(lengths[name])


def _parse(trt: Module, graph: bytes, name: str) -> Network:
    messages = Messages(trt)
    builder = trt.Builder(messages.logger)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, messages.logger)
    if not parser.parse(graph):
        reasons = [parser.get_error(idx).desc() for idx in range(parser.num_errors)]
        raise EngineError(f"{name}: TensorRT's parser refuses it ({'; '.join(reasons) or 'no reason given'})")
    return Network(trt, messages, builder, definition)
