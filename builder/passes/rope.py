"""Fuse the rotary embedding that transformers spells out into one operator (plugins/rotary_embedding.py)."""

import onnx_ir as ir
from onnxscript.rewriter import pattern

from pop_engine.plugins import rotary_embedding

# What may stand between cos or sin and the [f, f] of transformers' rotary modules without mixing the halves.
_KEEPS_HALVES = frozenset({"Cos", "Sin", "Mul", "Cast", "Gather", "Identity"})


def _halves_repeat(value: ir.Value) -> bool:
    """Whether the last axis is some f twice: then half of the table says everything."""
    node = value.producer()
    while node is not None and node.op_type in _KEEPS_HALVES:
        first = node.inputs[0]
        assert first is not None
        node = first.producer()
    return node is not None and node.op_type == "Concat" and len(set(node.inputs)) == 1 and len(node.inputs) == 2


class _RotateHalfFusion(pattern.RewriteRuleClassBase):
    """x·cos + rotate_half(x)·sin, as in transformers' apply_rotary_pos_emb; x is [B, H, rows, D]."""

    def __init__(self) -> None:
        super().__init__("RotateHalf", remove_nodes=False)

    def pattern(self, op, x, cos, sin, start1, end1, start2, end2, axis1, axis2):  # type: ignore[no-untyped-def]
        first = op.Slice(x, start1, end1, [3], [1])
        second = op.Slice(x, start2, end2, [3], [1])
        rotated = op.Concat(op.Neg(second), first, axis=-1)
        return op.Add(op.Mul(x, op.Unsqueeze(cos, axis1)), op.Mul(rotated, op.Unsqueeze(sin, axis2)))

    def check(self, context, x, cos, sin, start1, end1, start2, axis1, axis2, **_):  # type: ignore[no-untyped-def, override]
        result = pattern.MatchResult()
        if x.shape is None or not isinstance(x.shape[1], int) or not isinstance(x.shape[3], int):
            return result.fail("heads or head size unknown")
        half = x.shape[3] // 2
        cuts = [_scalar(value) for value in (start1, end1, start2, axis1, axis2)]
        if cuts != [0, half, half, 1, 1]:
            return result.fail("not the two halves")
        if not (_halves_repeat(cos) and _halves_repeat(sin)):
            return result.fail("cos or sin do not repeat their first half")
        return result

    def rewrite(self, op, x, cos, sin, **_):  # type: ignore[no-untyped-def]
        half = x.shape[3] // 2
        bounds = [op.Constant(value_ints=[bound]) for bound in (0, half, 2)]
        return rotary_embedding.make_node(op, x, op.Slice(cos, *bounds), op.Slice(sin, *bounds))


def _scalar(value: ir.Value) -> int | None:
    constant = ir.convenience.get_const_tensor(value)
    return None if constant is None or constant.size != 1 else int(constant.numpy().item())


class FuseRope(ir.passes.InPlacePass):
    """Fuse every rotary embedding. A family whose rotary has another form keeps the nodes it was traced with."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Apply the fusion to every place it fits."""
        rule = _RotateHalfFusion.rule()  # type: ignore[no-untyped-call]
        count = pattern.RewriteRuleSet([rule]).apply_to_model(model)
        return ir.passes.PassResult(model, modified=bool(count))
