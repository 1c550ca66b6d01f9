"""Spare the ONNX exporter what it would trace and run again: more than half of a build's time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Interpreter, Node

_aten = torch.ops.aten
_OTHER_NAMES = (_aten.alias, _aten.detach)


def simplify_conversions(graph: Graph) -> None:
    """Rewrite what a trace leaves and only a decomposition would remove: conversions, and other names of a tensor."""
    for node in list(graph.nodes):
        operator = getattr(node.target, "overloadpacket", None)
        is_output = any(user.op == "output" for user in node.users)
        same = operator in _OTHER_NAMES or (operator is _aten.to and _dtype(node) == _dtype(node.args[0]))
        # A program's outputs are told by the names of their nodes, so those stay.
        if same and not is_output:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif same or operator is _aten.to:
            # Whatever else it was asked for: a graph is all on one device.
            node.target = _aten._to_copy.default
            node.args, node.kwargs = node.args[:1], {"dtype": _dtype(node)}
        elif operator is _aten.reshape:
            # The same in ONNX, but for a size of 0, which the exporter's reshape takes for "as before".
            node.target = _aten.view.default


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_functional(graph: Graph) -> bool:
    """Whether no operator changes its argument, so that the order of the nodes is all there is to keep."""
    operators = [node.target for node in graph.nodes if node.op == "call_function"]
    return not any(operator._schema.is_mutable for operator in operators if isinstance(operator, torch._ops.OpOverload))


@contextmanager
def without_decompositions(program: ExportedProgram) -> Iterator[None]:
    """The program stands for its own decomposition meanwhile, which the exporter asks it for."""
    vars(program)["run_decompositions"] = lambda decomp_table=None: program
    try:
        yield
    finally:
        del vars(program)["run_decompositions"]


@contextmanager
def without_running(graph: Graph) -> Iterator[None]:
    """An interpreter of this graph takes what the trace found for each node's value, unless the node has changed.

    The exporter's type promotion runs every node once more, for values that nearly all of them have already.
    """
    traced = {node: (node.target, node.args, node.kwargs) for node in graph.nodes if "val" in node.meta}
    run_node = Interpreter.run_node

    def known_or_run(interpreter: Interpreter, node: Node) -> Any:
        if node.op == "call_function" and traced.get(node) == (node.target, node.args, node.kwargs):
            return node.meta["val"]
        return run_node(interpreter, node)

    with patch.object(Interpreter, "run_node", known_or_run):
        yield
