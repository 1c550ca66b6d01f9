"""Lower attention and cache writes to the operators of the ONNX standard, in the form that TensorRT can take."""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pop_engine.builder.passes.last_lowering import LastLowering
from pop_engine.builder.passes.linear_weights import replace_node
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.plugins.attention import Attention, lower_to_standard_attention
from pop_engine.plugins.kv_cache_update import KVCacheUpdate, lower_to_tensor_scatter
from pop_engine.plugins.window_mask import window_mask

ATTENTION_NAME = "attention.{}"


class LowerStandardAttention(LastLowering):
    """Attention-24 after TensorScatter-24: the cache is written once, then attended to as a whole.

    Causal attention takes the lengths; attention with a window, or with images seen whole, takes an explicit mask
    too, for TensorRT knows neither. Every attention is named by its layer, which is how the check after compiling
    finds it again.
    Raises EngineError where a layer needs what TensorRT lacks.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower every attention, then every write."""
        graph = model.graph
        lowering = _StandardLowering(graph)
        for node in list(graph):
            attention = Attention.match(node)
            if attention is not None:
                lowering.lower(attention)
        for node in list(graph):
            update = KVCacheUpdate.match(node)
            if update is not None:
                replace_node(graph, node, lower_to_tensor_scatter(update, update.pieces))
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=True)


class _StandardLowering:
    """What the attentions of one graph share: a mask for each window and number of rows, made once."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._masks: dict[tuple[object, ...], ir.Value] = {}
        layer_of = {io.present_key(layer_idx): layer_idx for layer_idx in range(len(graph.outputs))}
        self._names = {
            value: ATTENTION_NAME.format(layer_of[value.name]) for value in graph.outputs if value.name in layer_of
        }

    def lower(self, attention: Attention) -> None:
        name = self._names[attention.present_key]
        lacking = f"softcap {attention.softcap:g}" if attention.softcap else "a sink" if attention.head_sink else None
        if lacking is not None:
            raise EngineError(f"{name}: has {lacking}, which TensorRT's attention lacks; build for ort-cpu")
        mask = self._mask(attention) if attention.sliding_window or attention.image_ids is not None else None
        nodes = lower_to_standard_attention(attention, mask)
        named = next(node for node in nodes if node.op_type == "Attention")
        named.name = name
        replace_node(self._graph, attention.node, nodes)

    def _mask(self, attention: Attention) -> ir.Value:
        assert attention.query.shape is not None
        key = (attention.query.shape[2], attention.total_len, attention.sliding_window)
        if key not in self._masks:
            nodes = window_mask(attention)
            for node in nodes:
                self._graph.insert_before(attention.node, node)
            self._masks[key] = nodes[-1].outputs[0]
        return self._masks[key]
