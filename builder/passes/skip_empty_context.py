"""Run a tail's context part only in calls that have context rows."""

import numpy as np
import onnx_ir as ir

from pop_engine.configs import io_contract as io


class SkipEmptyContext(ir.passes.InPlacePass):
    """Move what only writes the context rows' K and V into one ONNX If, which a decode step skips.

    A node without rows computes nothing, but starting some ten of them a layer is a few percent of a decode step.
    The other branch hands every cache on: past and present are one buffer, so nothing is copied.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite a graph that has context rows."""
        graph = model.graph
        context_rows = next((value for value in graph.inputs if value.name == io.CONTEXT_ROWS), None)
        nodes = [] if context_rows is None else _context_nodes(graph, context_rows)
        writes = [node for node in nodes if node.op_type == "TensorScatter"]
        if context_rows is None or not writes:
            return ir.passes.PassResult(model, modified=False)
        present = [_hand_over(graph, node.outputs[0]) for node in writes]
        graph.remove(nodes)
        branches = {"then_branch": _write(nodes, writes), "else_branch": _keep(writes)}
        has_rows = _has_rows(context_rows)
        attributes = [ir.AttrGraph(name, branch) for name, branch in branches.items()]
        choice = ir.Node("", "If", [has_rows[-1].outputs[0]], attributes, outputs=present)
        graph.insert_before(graph[0], [*has_rows, choice])
        graph.sort()
        return ir.passes.PassResult(model, modified=True)


def _context_nodes(graph: ir.Graph, context_rows: ir.Value) -> list[ir.Node]:
    """The nodes between the context rows and the writes of their K and V, in order, less those with other readers."""
    found, waiting = set[ir.Node](), [context_rows]
    while waiting:
        for node in waiting.pop().consumers():
            if node not in found:
                found.add(node)
                waiting += [] if node.op_type == "TensorScatter" else node.outputs
    while shared := {node for node in found if node.op_type != "TensorScatter" and not _feeds_only(node, found)}:
        found -= shared
    return [node for node in graph if node in found]


def _feeds_only(node: ir.Node, readers: set[ir.Node]) -> bool:
    return all(
        not output.is_graph_output() and all(reader in readers for reader in output.consumers())
        for output in node.outputs
    )


def _hand_over(graph: ir.Graph, written: ir.Value) -> ir.Value:
    """A value of the same name in place of a written cache, which becomes the branch's."""
    present = ir.Value(name=written.name, type=written.type, shape=written.shape)
    written.name = f"{written.name}.context"
    ir.convenience.replace_all_uses_with(written, present, replace_graph_outputs=True)
    return present


def _has_rows(context_rows: ir.Value) -> list[ir.Node]:
    """Nodes whose last tells whether the call has context rows."""
    count = ir.node("Size", [context_rows])
    zero = ir.node("Constant", [], {"value": ir.tensor(np.array(0, np.int64))})
    return [count, zero, ir.node("Greater", [count.outputs[0], zero.outputs[0]])]


def _write(nodes: list[ir.Node], writes: list[ir.Node]) -> ir.Graph:
    return ir.Graph([], [node.outputs[0] for node in writes], nodes=nodes, name="write_context_rows")


def _keep(writes: list[ir.Node]) -> ir.Graph:
    nodes = [ir.node("Identity", [node.inputs[0]]) for node in writes]
    for node, write in zip(nodes, writes, strict=True):
        kept, written = node.outputs[0], write.outputs[0]
        kept.name, kept.type, kept.shape = f"{written.name}.kept", written.type, written.shape
    return ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name="keep_caches")
