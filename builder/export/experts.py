"""Mixture-of-experts layers, traced with one operator for all experts of a layer."""

from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from pop_engine.configs.errors import EngineError
from pop_engine.plugins import experts as experts_op
from pop_engine.plugins.experts import Gate

# Below the logarithm of every weight that a router gives: such an expert is not chosen.
_NEVER = -1e30
_SMALLEST_WEIGHT = 1e-30


def trace_experts(model: nn.Module) -> None:
    """Make every module of experts trace as the operator.

    Raises EngineError where its experts are no gated MLPs of the operator's kind.
    """
    for module in model.modules():
        # What transformers' `use_experts_implementation` gives a class.
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            module.forward = _ExpertsForward(module)


class _ExpertsForward:
    """Stands for the forward of one module of experts."""

    def __init__(self, module: Any) -> None:
        if not module.has_gate or module.has_post_expert_norm:
            raise EngineError(f"{type(module).__name__}: experts that are no gated MLPs cannot be exported")
        self._module = module
        self._gate = _find_gate(module)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows [T, H], and the experts and weights [T, k] that the router chose for each."""
        module, weights = self._module, top_k_weights.to(hidden_states.dtype)
        scores = hidden_states.new_full((hidden_states.shape[0], module.num_experts), _NEVER)
        scores = scores.scatter(1, top_k_index, weights.clamp(min=_SMALLEST_WEIGHT).log())
        gate_up, down = module.gate_up_proj, module.down_proj
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        biases = [module.gate_up_proj_bias, module.down_proj_bias] if module.has_bias else []
        output = torch.onnx.ops.symbolic(
            f"{experts_op.DOMAIN}::{experts_op.OP_TYPE}",
            (hidden_states, scores, gate_up, down, *biases),
            {
                "num_chosen": int(top_k_index.shape[1]),
                "alpha": self._gate.alpha,
                "beta": self._gate.beta,
                "limit": self._gate.limit,
                "is_interleaved": int(self._gate.is_interleaved),
            },
            dtype=hidden_states.dtype,
            shape=hidden_states.shape,
            version=experts_op.VERSION,
        )
        # The operator's weights add up to one, a router's need not.
        return output * weights.sum(dim=-1, keepdim=True)


def _find_gate(module: Any) -> Gate:
    """The gate that a class applies, found by trying: its constants are numbers that the module keeps."""
    numbers = [float(value) for value in vars(module).values() if type(value) in (int, float) and value]
    candidates = product((1.0, *numbers), (0.0, 1.0), (np.inf, *numbers), (False, True))
    with _disable_current_modes():
        # Far enough out for a clamp to show.
        given = torch.linspace(-20, 20, 2 * 30, dtype=torch.float64)[torch.randperm(60, generator=_seeded())]
        expected = module._apply_gate(given).numpy()
    for alpha, beta, limit, is_interleaved in candidates:
        gate = Gate(alpha, beta, limit, is_interleaved)
        if np.allclose(gate(given.numpy()), expected, rtol=1e-5, atol=1e-6):
            return gate
    raise EngineError(f"{type(module).__name__}: experts with a gate other than SwiGLU cannot be exported")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
