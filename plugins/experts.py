"""Experts: each row through the few gated MLPs that its router has chosen, weighted and summed."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

DOMAIN = "pop"
OP_TYPE = "Experts"
VERSION = 1


@dataclass(frozen=True)
class Gate:
    """How an expert turns its first product into the input of its second: gate · sigmoid(alpha · gate) · (up + beta).

    Both halves are clamped to `limit` before, the gate from above only. `is_interleaved` says that gate and up take
    turns along the axis, instead of one after the other.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = np.inf
    is_interleaved: bool = False

    def __call__(self, product: NDArray[np.floating]) -> NDArray[np.floating]:
        """Apply it to the last axis, [2 · I] to [I]."""
        half = product.shape[-1] // 2
        gate = product[..., ::2] if self.is_interleaved else product[..., :half]
        up = product[..., 1::2] if self.is_interleaved else product[..., half:]
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        with np.errstate(over="ignore"):
            result: NDArray[np.floating] = gate / (1 + np.exp(-self.alpha * gate)) * (up + self.beta)
        return result


@dataclass(frozen=True)
class Experts:
    """One Experts node of a traced graph.

    `rows` are [T, H]; `scores` [T, E] are log weights, very low for experts that were not chosen; the experts'
    weights are their softmax over the best `num_chosen`. `gate_up` is [E, 2 · I, H] and `down` [E, H, I].
    """

    node: ir.Node
    rows: ir.Value
    scores: ir.Value
    gate_up: ir.Value
    down: ir.Value
    gate_up_bias: ir.Value | None
    down_bias: ir.Value | None
    num_chosen: int
    gate: Gate

    @classmethod
    def match(cls, node: ir.Node) -> "Experts | None":
        """This node as experts, or None where it is something else."""
        if node.domain != DOMAIN or node.op_type != OP_TYPE:
            return None
        rows, scores, gate_up, down, *biases = node.inputs
        assert rows is not None
        assert scores is not None
        assert gate_up is not None
        assert down is not None
        attributes = {name: node.attributes[name].value for name in ("alpha", "beta", "limit", "is_interleaved")}
        gate_up_bias, down_bias = biases or (None, None)
        num_chosen = node.attributes["num_chosen"].as_int()
        gate = Gate(**{**attributes, "is_interleaved": bool(attributes["is_interleaved"])})
        return cls(node, rows, scores, gate_up, down, gate_up_bias, down_bias, num_chosen, gate)


def reference(
    rows: NDArray[np.float64],
    scores: NDArray[np.float64],
    gate_up: NDArray[np.float64],
    down: NDArray[np.float64],
    gate: Gate,
    num_chosen: int,
) -> NDArray[np.float64]:
    """What the operator computes, without biases."""
    output = np.zeros_like(rows)
    for row, row_scores in enumerate(scores):
        chosen = np.argsort(row_scores)[-num_chosen:]
        weights = np.exp(row_scores[chosen] - row_scores.max())
        for expert, weight in zip(chosen, weights / weights.sum(), strict=True):
            output[row] += weight * (down[expert] @ gate(gate_up[expert] @ rows[row]))
    return output


def lower_to_moe(experts: Experts, gate_up: ir.Value, gate_up_bias: ir.Value | None) -> ir.Node:
    """com.microsoft.MoE, whose CPU kernel runs the chosen experts only and wants gate and up interleaved."""
    limit = {} if np.isinf(experts.gate.limit) else {"swiglu_limit": experts.gate.limit}
    return ir.node(
        "MoE",
        [experts.rows, experts.scores, gate_up, gate_up_bias, experts.down, experts.down_bias],
        {
            "k": experts.num_chosen,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": experts.gate.alpha,
            "activation_beta": experts.gate.beta,
            "normalize_routing_weights": 0,
            **limit,
        },
        domain="com.microsoft",
    )
