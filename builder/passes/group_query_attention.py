"""Lower attention and cache writes to com.microsoft.GroupQueryAttention."""

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from pop_engine.builder.passes.last_lowering import LastLowering
from pop_engine.builder.passes.linear_weights import copy_dtype, replace_node
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.plugins.attention import Attention, GroupQueryAttentionInputs, lower_to_group_query_attention
from pop_engine.plugins.image_attention import attend_to_images, has_image_rows
from pop_engine.plugins.kv_cache_update import KVCacheUpdate, lower_to_tensor_scatter


class LowerAttention(LastLowering):
    """Attention and its cache write become GroupQueryAttention, whose cost follows the valid length.

    It writes the cache itself. So a layer's single write goes away, and a one-pass tail layer keeps a TensorScatter
    for its context rows and hands the result on: both writes land in one buffer, as two outputs of the graph.

    Without `query_seqlens` no call may lack query rows, and only a single sequence may bring several. The boundary row
    is then one that a chunk of context rows repeats behind its end: io_contract.prefill_contract.

    GroupQueryAttention is always causal. Where rows of images see beyond themselves, an If attends to them again in
    calls that have such rows; other calls pay for a look at their ids.
    """

    def __init__(self, *, query_seqlens: bool = True) -> None:
        super().__init__()
        self._has_query_seqlens = query_seqlens

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Lower every attention, then the writes that are left."""
        graph = model.graph
        lowering = _AttentionLowering(graph, query_seqlens=self._has_query_seqlens)
        for node in list(graph):
            attention = Attention.match(node)
            if attention is not None:
                lowering.lower(attention)
        RemoveUnusedNodesPass()(model)
        for node in list(graph):
            update = KVCacheUpdate.match(node)
            if update is not None:
                pieces = update.pieces[:-1] if update.node in lowering.half_written else update.pieces
                replace_node(graph, node, lower_to_tensor_scatter(update, pieces))
        model.opset_imports["com.microsoft"] = 1
        return ir.passes.PassResult(model, modified=True)


class _AttentionLowering:
    """What the attentions of one graph share: counts of rows, lengths and constants, each computed once.

    `half_written` are the updates whose last piece the attention writes.
    """

    def __init__(self, graph: ir.Graph, *, query_seqlens: bool) -> None:
        self._graph = graph
        self._has_query_seqlens = query_seqlens
        self._made: dict[tuple[object, ...], ir.Value] = {}
        self.half_written: set[ir.Node] = set()

    def lower(self, attention: Attention) -> None:
        key, value = (self._update(present) for present in (attention.present_key, attention.present_value))
        single_write = len(key.pieces) == 1
        heads = attention.num_key_value_heads
        total_len = attention.total_len
        if not self._has_query_seqlens and not single_write:
            total_len = self._written_len(key)
        inputs = GroupQueryAttentionInputs(
            query=self._rows_of_heads(attention.node, attention.query, attention.num_heads, attention.head_dim),
            key=self._rows_of_heads(attention.node, key.pieces[-1], heads, attention.head_dim),
            value=self._rows_of_heads(attention.node, value.pieces[-1], heads, attention.head_dim),
            past_key=key.past if single_write else key.present,
            past_value=value.past if single_write else value.present,
            seqlens_k=self._seqlens_k(total_len),
            max_total_len=self._max_total_len(total_len),
            query_seqlens=self._query_seqlens(attention) if self._has_query_seqlens else None,
        )
        node = lower_to_group_query_attention(attention, inputs)
        self._graph.insert_before(attention.node, node)
        for update, written in ((key, node.outputs[1]), (value, node.outputs[2])):
            self._expose(update.present, written, replaces=single_write)
        attended = node.outputs[0]
        if attention.image_ids is not None:
            reads = replace(attention, present_key=node.outputs[1], present_value=node.outputs[2])
            attended = self._see_images(reads, inputs.query, attended)
        replace_node(self._graph, attention.node, [self._split_heads(attention, attended)])

    def _see_images(self, attention: Attention, query: ir.Value, attended: ir.Value) -> ir.Value:
        """What GroupQueryAttention has `attended` to, corrected where a call has rows of images."""
        if not self._has_query_seqlens:
            raise EngineError("attention among an image's tokens: this target's attention is causal; build for ort-cpu")
        assert attention.head_sink is None, "no attention of the standard has a sink"
        assert query.shape is not None
        rows = ("image rows", query.shape[1])
        if rows not in self._made:
            condition = has_image_rows(attention, query)
            self._graph.insert_before(attention.node, condition)
            self._made[rows] = condition[-1].outputs[0]
        nodes = {"then_branch": attend_to_images(attention, query, attended)}
        nodes["else_branch"] = [ir.node("Identity", [attended])]
        branches = [_branch(name, f"{attention.present_key.name}.{name}", own) for name, own in nodes.items()]
        choice = ir.Node("", "If", [self._made[rows]], branches)
        self._graph.insert_before(attention.node, choice)
        return choice.outputs[0]

    @staticmethod
    def _update(present: ir.Value) -> KVCacheUpdate:
        update = KVCacheUpdate.match(present.producer())
        assert update is not None, f"{present.name} is not a written cache"
        return update

    def _expose(self, present: ir.Value, written: ir.Value, *, replaces: bool) -> None:
        """Make `written` a graph output: in place of the single write, or as the second write to the same buffer."""
        assert present.name is not None
        written.shape = present.shape
        copy_dtype(present, written)
        outputs = self._graph.outputs
        if replaces:
            written.name = present.name
            present.name = f"{present.name}.unlowered"
            outputs[outputs.index(present)] = written
        else:
            written.name = io.boundary_write(present.name)
            outputs.append(written)
            producer = present.producer()
            assert producer is not None
            self.half_written.add(producer)

    def _split_heads(self, attention: Attention, joined: ir.Value) -> ir.Node:
        out = attention.node.outputs[0]
        assert out.shape is not None
        batch, rows, heads, head_dim = out.shape
        assert isinstance(heads, int)
        assert isinstance(head_dim, int)
        joined.shape = ir.Shape([batch, rows, heads * head_dim])
        copy_dtype(out, joined)
        return ir.node("Reshape", [joined, self._constant([0, 0, heads, head_dim])])

    def _rows_of_heads(self, before: ir.Node, value: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """[B, H, rows, D] as [B, rows, H · D], undoing the transpose it came from where there is one."""
        made = self._made.get(("rows", value))
        if made is None:
            made = self._made["rows", value] = self._make_rows(before, value, heads, head_dim)
        return made

    def _make_rows(self, before: ir.Node, value: ir.Value, heads: int, head_dim: int) -> ir.Value:
        node = value.producer()
        width = heads * head_dim
        if node is not None and node.op_type == "RotaryEmbedding":
            data, *tables = node.inputs
            assert data is not None
            attributes = dict(node.attributes)
            attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
            rotated = ir.node("RotaryEmbedding", [self._make_rows(before, data, heads, head_dim), *tables], attributes)
            return self._insert(before, rotated, value, width)
        if node is not None and node.op_type == "Transpose" and list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
            rows = node.inputs[0]
        else:
            transpose = ir.node("Transpose", [value], {"perm": [0, 2, 1, 3]})
            self._graph.insert_before(before, transpose)
            rows = transpose.outputs[0]
        assert rows is not None
        source = rows.producer()
        if source is not None and source.op_type == "Reshape":
            flat = source.inputs[0]
            if flat is not None and flat.shape is not None and len(flat.shape) == 3 and flat.shape[2] == width:
                return flat
        return self._insert(before, ir.node("Reshape", [rows, self._constant([0, 0, width])]), value, width)

    def _insert(self, before: ir.Node, node: ir.Node, like: ir.Value, width: int) -> ir.Value:
        assert like.shape is not None
        output = node.outputs[0]
        output.shape = ir.Shape([like.shape[0], like.shape[2], width])
        copy_dtype(like, output)
        self._graph.insert_before(before, node)
        return output

    def _constant(self, values: list[int] | int) -> ir.Value:
        tensor = ir.tensor(np.array(values, dtype=np.int64))
        return self._shared(("constant", str(values)), "Constant", [], {"value": tensor})

    def _shared(
        self, key: tuple[object, ...], op_type: str, inputs: list[ir.Value], attributes: dict[str, Any]
    ) -> ir.Value:
        """The output of a node that is made once per graph. A topological sort puts it in its place later."""
        if key not in self._made:
            node = ir.node(op_type, inputs, attributes)
            self._graph.insert_before(self._graph[0], node)
            self._made[key] = node.outputs[0]
        return self._made[key]

    def _int32(self, value: ir.Value) -> ir.Value:
        return self._shared(("int32", value), "Cast", [value], {"to": int(ir.DataType.INT32)})

    def _seqlens_k(self, total_len: ir.Value) -> ir.Value:
        return self._int32(self._shared(("last", total_len), "Sub", [total_len, self._constant(1)], {}))

    def _max_total_len(self, total_len: ir.Value) -> ir.Value:
        return self._int32(self._shared(("longest", total_len), "ReduceMax", [total_len], {"keepdims": 0}))

    def _count(self, rows: int | ir.SymbolicDim) -> ir.Value:
        """A dimension's size [1], read off the graph input that has it."""
        if isinstance(rows, int):
            return self._constant([rows])
        source, axis = next(
            (value, axis) for value in self._graph.inputs for axis, dim in enumerate(value.shape or ()) if dim == rows
        )
        return self._shared(("count", rows), "Shape", [source], {"start": axis, "end": axis + 1})

    def _written_len(self, update: KVCacheUpdate) -> ir.Value:
        """Tokens [B] that the cache holds once all pieces are written, where that may be more than the call's rows."""
        total = update.cache_len
        for piece in update.pieces:
            assert piece.shape is not None
            total = self._shared(("written", total, piece.shape[2]), "Add", [total, self._count(piece.shape[2])], {})
        return total

    def _query_seqlens(self, attention: Attention) -> ir.Value:
        """How many rows each sequence of the batch brings."""
        assert attention.query.shape is not None
        rows = attention.query.shape[2]
        count = self._count(rows)
        batch = self._shared(("batch",), "Shape", [attention.total_len], {})
        return self._shared(("query_seqlens", rows), "Expand", [self._int32(count), batch], {})


def _branch(attribute: str, prefix: str, nodes: list[ir.Node]) -> ir.Attr:
    """Nodes as a branch of an If, with names that begin with `prefix`: its own would be the outer graph's too."""
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{prefix}.{number}"
    return ir.AttrGraph(attribute, ir.Graph([], [nodes[-1].outputs[0]], nodes=nodes, name=prefix))
