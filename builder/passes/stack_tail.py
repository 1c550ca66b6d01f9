"""Project the context rows onto the K and V of many tail layers at once: they all read the trunk's output."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

PRODUCT = "FusedMatMul"
NORM = "RMSNormalization"
_WRITE = "TensorScatter"
# Heads are split off and put before the rows: [B, S, H·D] to [B, H, S, D].
_HEADS_FIRST = (0, 2, 1, 3)


class StackTail(ir.passes.InPlacePass):
    """Stack the projections of tail layers whose K, or V, come from one value by the same operators.

    Ten small products and some hundred nodes become two products, and a decode step, which has no context rows, has
    fewer nodes to start. The stacked weights are an expression of the checkpoint's, which ONNX Runtime computes when
    it loads the graph: on disk there is still one copy. A norm's weight goes into the product behind it
    (W (g ⊙ x) = (W ⊙ g) x), so that one norm serves all. What has another form stays as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every group of two writes or more."""
        groups: dict[object, list[_Chain]] = defaultdict(list)
        for node in model.graph:
            chain = _chain_of(node) if node.op_type == _WRITE else None
            if chain is not None:
                groups[chain.form()].append(chain)
        stacks = [chains for chains in groups.values() if len(chains) > 1]
        for chains in stacks:
            _Stack(model.graph, chains).build()
        model.graph.sort()
        RemoveUnusedNodesPass()(model)
        return ir.passes.PassResult(model, modified=bool(stacks))


@dataclass(eq=False)
class _Chain:
    """What leads from a value that holds rows to one write into a cache, in order."""

    write: ir.Node
    source: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)

    def form(self) -> object:
        """Equal for chains that differ in nothing but their weights."""
        return (self.source, *(_form_of(node) for node in self.nodes))

    def num_heads(self) -> int:
        """Heads that this chain writes."""
        return next(int(target[2]) for node in self.nodes if (target := _target_of(node)) is not None)


def _chain_of(write: ir.Node) -> _Chain | None:
    """The chain that ends in a write, or None where it has operators that cannot be stacked."""
    value, nodes = write.inputs[1], list[ir.Node]()
    while value is not None and (node := value.producer()) is not None and _form_of(node) is not None:
        nodes.insert(0, node)
        value = node.inputs[0]
    products = [place for place, node in enumerate(nodes) if node.op_type == PRODUCT]
    reshapes = [node for node in nodes if node.op_type == "Reshape"]
    if value is None or len(reshapes) != 1 or len(products) != 1 or products[0] > 1:
        return None
    return _Chain(write, value, nodes)


def _form_of(node: ir.Node) -> tuple[object, ...] | None:
    """All of a node but its weight, or None for an operator that cannot be stacked."""
    attributes = tuple(sorted((name, str(value.value)) for name, value in node.attributes.items()))
    form = (node.op_type, attributes)
    target = _target_of(node)
    match node.op_type:
        case "FusedMatMul" if node.attributes.get_int("transB", 0) and node.attributes.get_float("alpha", 1.0) == 1.0:
            return form
        case "Add" if _num_axes(node.inputs[1]) == 1:
            return form
        case "RMSNormalization" if node.attributes.get_int("axis", -1) == -1 and _num_axes(node.inputs[1]) == 1:
            return form
        case "RotaryEmbedding":
            return (*form, *node.inputs[1:])
        case "Transpose" if tuple(node.attributes["perm"].as_ints()) == _HEADS_FIRST:
            return form
        case "Reshape" if target is not None and len(target) == 4 and target[2] > 0:
            return (*form, *target)
    return None


def _num_axes(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _target_of(node: ir.Node) -> tuple[int, ...] | None:
    """The constant target of a Reshape."""
    if node.op_type != "Reshape" or node.inputs[1] is None:
        return None
    constant = ir.convenience.get_const_tensor(node.inputs[1])
    return None if constant is None else tuple(int(number) for number in constant.numpy())


class _Stack:
    """Builds the nodes that do for all chains of a group what each did alone."""

    def __init__(self, graph: ir.Graph, chains: Sequence[_Chain]) -> None:
        self._graph = graph
        self._chains = chains
        self._num_heads = chains[0].num_heads()
        self._before = next(node for node in graph if node in {chain.write for chain in chains})
        self._folded: list[ir.Value] | None = None
        self._heads_first = False

    def build(self) -> None:
        """Insert the stacked nodes and have every write read its part."""
        value = self._chains[0].source
        for nodes in zip(*(chain.nodes for chain in self._chains), strict=True):
            value = self._stacked(value, nodes)
        attributes = {"axis": 1, "num_outputs": len(self._chains)}
        parts = ir.node("Split", [value], attributes, num_outputs=len(self._chains))
        self._graph.insert_before(self._before, parts)
        for chain, part in zip(self._chains, parts.outputs, strict=True):
            chain.write.replace_input_with(1, part)

    def _stacked(self, value: ir.Value, nodes: Sequence[ir.Node]) -> ir.Value:
        """One node's stacked form, fed by `value`."""
        first = nodes[0]
        match first.op_type:
            case "FusedMatMul":
                return self._like(first, value, self._concat([self._weight(*pair) for pair in enumerate(nodes)]))
            case "Add":
                return self._like(first, value, self._concat([_input(node, 1) for node in nodes]))
            case "RMSNormalization":
                return self._norm(value, nodes)
            case "Reshape":
                _, _, num_heads, head_dim = _target_of(first) or ()
                return self._like(first, value, self._constant([0, 0, num_heads * len(nodes), head_dim]))
            case "Transpose":
                self._heads_first = True
        return self._like(first, value, *(_input(first, place) for place in range(1, len(first.inputs))))

    def _norm(self, value: ir.Value, nodes: Sequence[ir.Node]) -> ir.Value:
        """A norm before the product leaves its weight to it; one of heads is followed by all heads' weights."""
        weights = [_input(node, 1) for node in nodes]
        if all(weight is weights[0] for weight in weights):
            return self._like(nodes[0], value, weights[0])
        plain = self._like(nodes[0], value, self._ones_like(weights[0]))
        if nodes[0].inputs[0] is self._chains[0].source:
            self._folded = weights
            return plain
        shape = [self._num_heads, 1, -1] if self._heads_first else [self._num_heads, -1]
        ones = self._constant([self._num_heads, *[1] * (len(shape) - 1)])
        heads = [self._add("Expand", self._expand_ready(weight, shape), ones) for weight in weights]
        return self._add("Mul", plain, self._concat(heads))

    def _expand_ready(self, weight: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self._add("Reshape", weight, self._constant([1] * (len(shape) - 1) + [-1]))

    def _weight(self, place: int, node: ir.Node) -> ir.Value:
        weight = _input(node, 1)
        return weight if self._folded is None else self._add("Mul", weight, self._folded[place])

    def _ones_like(self, weight: ir.Value) -> ir.Value:
        assert weight.shape is not None
        assert weight.dtype is not None
        return self._constant(np.ones(weight.shape.numpy(), weight.dtype.numpy()))

    def _constant(self, value: Sequence[int] | np.ndarray) -> ir.Value:
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        return self._insert(ir.node("Constant", [], {"value": ir.tensor(array)}))

    def _concat(self, values: Sequence[ir.Value]) -> ir.Value:
        return self._insert(ir.node("Concat", values, {"axis": 0}))

    def _add(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        return self._insert(ir.node(op_type, inputs))

    def _like(self, node: ir.Node, *inputs: ir.Value) -> ir.Value:
        """The same operator with the same attributes on other inputs."""
        return self._insert(ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=1))

    def _insert(self, node: ir.Node) -> ir.Value:
        self._graph.insert_before(self._before, node)
        return node.outputs[0]


def _input(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[place]
    assert value is not None
    return value
