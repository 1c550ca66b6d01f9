"""Make the lengths of every attention reachable after TensorRT's parser has dropped them."""

from dataclasses import dataclass

import onnx_ir as ir

_QUERY, _KEY, _VALUE, _MASK, _LENGTHS = 0, 1, 2, 3, 6
LENGTHS_NAME = "attention_lengths.{}"


@dataclass(frozen=True)
class ExpectedAttention:
    """What one attention of the graph must still be once it is a layer of a network: the tensors that it reads."""

    name: str
    query: str
    key: str
    value: str
    lengths: str
    mask: str | None


class ExposeLengths(ir.passes.InPlacePass):
    """Add each lengths tensor as an int32 output of the graph. Wiring takes the output away again.

    The parser ignores Attention's `nonpad_kv_seqlen` without a word, and then keeps nothing that leads to it. Masks
    survive. `expected` says afterwards what every attention was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.expected: tuple[ExpectedAttention, ...] = ()

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Add the outputs; the graph is then no longer the contract's."""
        names: dict[ir.Value, str] = {}
        expected: list[ExpectedAttention] = []
        for node in list(model.graph):
            if node.op_type != "Attention":
                continue
            lengths = node.inputs[_LENGTHS]
            assert lengths is not None
            if lengths not in names:
                names[lengths] = LENGTHS_NAME.format(len(names))
                self._expose(model.graph, lengths, names[lengths])
            expected.append(_expectation(node, names[lengths]))
        self.expected = tuple(expected)
        return ir.passes.PassResult(model, modified=bool(names))

    def _expose(self, graph: ir.Graph, lengths: ir.Value, name: str) -> None:
        cast = ir.node("Cast", [lengths], {"to": int(ir.DataType.INT32)})
        output = cast.outputs[0]
        output.name, output.dtype, output.shape = name, ir.DataType.INT32, lengths.shape
        graph.append(cast)
        graph.outputs.append(output)


def _expectation(node: ir.Node, lengths: str) -> ExpectedAttention:
    mask = node.inputs[_MASK]
    assert node.name is not None
    return ExpectedAttention(
        node.name,
        query=_name(node.inputs[_QUERY]),
        key=_name(node.inputs[_KEY]),
        value=_name(node.inputs[_VALUE]),
        lengths=lengths,
        mask=None if mask is None else _name(mask),
    )


def _name(value: ir.Value | None) -> str:
    assert value is not None
    assert value.name is not None
    return value.name
