"""A lowered graph as a TensorRT network: parsed, then wired where the parser loses what the graph says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from pop_engine.builder.compile.tensorrt_weights import NO_WEIGHTS, MappedWeights
from pop_engine.builder.passes.expose_lengths import ExpectedAttention, ExposeLengths
from pop_engine.configs.errors import EngineError
from pop_engine.plugins.tensorrt_messages import Messages, Module


@dataclass(frozen=True)
class Network:
    """A network definition, the module it belongs to, and what has to stay alive as long as it does.

    `weights` are the parameters that it holds as constants, by name: none where they are inputs.
    """

    trt: Module
    messages: Messages
    builder: Any
    definition: Any
    weights: MappedWeights

    def layers(self) -> Iterator[Any]:
        """Every layer, as TensorRT's base class."""
        return (self.definition.get_layer(idx) for idx in range(self.definition.num_layers))

    def inputs(self) -> list[Any]:
        """The input tensors."""
        return [self.definition.get_input(idx) for idx in range(self.definition.num_inputs)]

    def outputs(self) -> list[Any]:
        """The output tensors."""
        return [self.definition.get_output(idx) for idx in range(self.definition.num_outputs)]

    def tensors(self) -> dict[str, Any]:
        """Every tensor that a layer makes, by name."""
        made = (layer.get_output(idx) for layer in self.layers() for idx in range(layer.num_outputs))
        return {tensor.name: tensor for tensor in made}

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


def make_network(
    trt: Module, model: ir.Model, name: str, weights: MappedWeights = NO_WEIGHTS
) -> tuple[Network, tuple[ExpectedAttention, ...]]:
    """Parse a lowered graph and wire it. Also returns what the attentions were in the graph; `model` is used up.

    Raises EngineError where TensorRT refuses the graph, naming it `name`.
    """
    expose = ExposeLengths()
    expose(model)
    network = _parse(trt, ir.to_proto(model).SerializeToString(), name, weights)
    wire_attentions(network, expose.expected)
    multiply_by_weights_as_stored(network)
    return network, expose.expected


def wire_attentions(network: Network, expected: Sequence[ExpectedAttention]) -> None:
    """Give every attention its lengths, and its causality from the last key back where no mask says it.

    It also reads query and cache as the graph has them: the parser multiplies both by the root of the scale, which is
    1 here, and that would be a pass over the whole cache in every call. Raises EngineError where an attention of the
    graph is not in the network.
    """
    tensors = network.tensors()
    found = {attention.name: attention for attention in network.attentions()}
    for expectation in expected:
        if expectation.name not in found:
            raise EngineError(f"{expectation.name}: TensorRT's parser lost it")
        attention = found[expectation.name]
        attention.set_input(0, tensors[expectation.query])
        attention.set_input(1, tensors[expectation.key])
        attention.key_value_lengths = tensors[expectation.lengths]
        if expectation.mask is None:
            attention.causal_kind = network.trt.CausalMaskKind.LOWER_RIGHT
    for name in {expectation.lengths for expectation in expected}:
        network.definition.unmark_output(tensors[name])


def multiply_by_weights_as_stored(network: Network) -> None:
    """Multiply by a weight [out, in] with a transposing product instead of by its transpose.

    The weights are inputs, so nothing is transposed ahead of time: TensorRT would do it in every call.
    """
    trt = network.trt
    transposed = _transposed_inputs(network)
    broadcast: dict[str, Any] = {}
    for layer in list(network.layers()):
        if layer.type == trt.LayerType.SHUFFLE and layer.get_input(0).name in transposed:
            broadcast[layer.get_output(0).name] = transposed[layer.get_input(0).name]
        elif layer.type == trt.LayerType.MATRIX_MULTIPLY and layer.get_input(1).name in broadcast:
            weight = broadcast[layer.get_input(1).name]
            stored = network.definition.add_shuffle(weight)
            stored.reshape_dims = (1, *weight.shape)
            layer.__class__ = trt.IMatrixMultiplyLayer
            layer.set_input(1, stored.get_output(0))
            layer.op1 = trt.MatrixOperation.TRANSPOSE


def _transposed_inputs(network: Network) -> dict[str, Any]:
    """Names of plain transposes of network inputs, to those inputs."""
    transposed: dict[str, Any] = {}
    for layer in network.layers():
        if layer.type == network.trt.LayerType.SHUFFLE and layer.get_input(0).is_network_input:
            layer.__class__ = network.trt.IShuffleLayer
            if len(layer.get_input(0).shape) == 2 and tuple(layer.first_transpose)[:2] == (1, 0):
                transposed[layer.get_output(0).name] = layer.get_input(0)
    return transposed


def _parse(trt: Module, graph: bytes, name: str, weights: MappedWeights) -> Network:
    messages = Messages(trt)
    builder = trt.Builder(messages.logger)
    definition = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(definition, messages.logger)
    loaded = parser.load_model_proto(graph)
    for weight, data in weights.items():
        loaded = loaded and parser.load_initializer(weight, data.ctypes.data, data.nbytes)
    if not loaded or not parser.parse_model_proto():
        reasons = [parser.get_error(idx).desc() for idx in range(parser.num_errors)]
        raise EngineError(f"{name}: TensorRT's parser refuses it ({'; '.join(reasons) or 'no reason given'})")
    return Network(trt, messages, builder, definition, weights)
