"""Tail layers with calibrated K and V projections for context rows, and the model's own for every other row."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from pop_engine.builder.export.projections import tail_projections
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan

# Set under this name below the projection that it stands in for.
_MODULE = "calibrated"

ProjectionForward = Callable[[torch.Tensor], torch.Tensor]


def calibrated_shapes(model: PreTrainedModel, plan: PrunePlan) -> dict[str, tuple[int, ...]]:
    """Shapes of the calibrated weights and biases, by name: of every tail layer but the first.

    Raises UsageError where the model's tail cannot be calibrated.
    """
    if plan.num_tail_layers < 2:
        raise UsageError(
            f"calibration: a tail of {plan.num_tail_layers} has nothing to calibrate (the first tail layer's K and V "
            "are right already); give --tail-layers 2 or more"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in tail_projections(model, plan)[1:]:
        for name, projection in layer.named():
            shapes[weight_name(name)] = (projection.out_features, projection.in_features)
            shapes[bias_name(name)] = (projection.out_features,)
    return shapes


def weight_name(projection: str) -> str:
    """Name of the calibrated weight of a projection."""
    return f"{projection}.{_MODULE}.weight"


def bias_name(projection: str) -> str:
    """Name of the calibrated bias of a projection."""
    return f"{projection}.{_MODULE}.bias"


class CalibratedTail:
    """The calibrated projections of a model, in force within `context_rows` and nowhere else.

    They all read one tensor: what the first tail layer's own projections read, that is, the trunk's output after
    that layer's input norm. The other layers' norms are not applied to context rows. So no norm weight is folded
    into a map (W · diag(1/g) overflows where a g is near zero), whatever the norm is the map stays exact, and the
    first tail layer, whose K and V POP gets right, keeps its own projections. The maps end where K and V do, before
    k_norm and RoPE, which stay the layer's own.
    """

    def __init__(self, model: PreTrainedModel, plan: PrunePlan, parameters: Mapping[str, nn.Parameter]) -> None:
        """Add the parameters, named as by `calibrated_shapes`, to the model and watch its tail's projections."""
        self._active = False
        self._state: torch.Tensor | None = None
        first, *others = tail_projections(model, plan)
        _replace_forward(first.key, self._keep_state(first.key.forward))
        for layer in others:
            for name, projection in layer.named():
                calibrated = _AffineMap(parameters[weight_name(name)], parameters[bias_name(name)])
                projection.add_module(_MODULE, calibrated)
                _replace_forward(projection, self._choose(projection.forward, calibrated))

    @contextmanager
    def context_rows(self) -> Iterator[None]:
        """Within it, the tail's projections are the calibrated ones."""
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _keep_state(self, run: ProjectionForward) -> ProjectionForward:
        def forward(state: torch.Tensor) -> torch.Tensor:
            if self._active:
                self._state = state
            return run(state)

        return forward

    def _choose(self, run: ProjectionForward, calibrated: ProjectionForward) -> ProjectionForward:
        def forward(state: torch.Tensor) -> torch.Tensor:
            if not self._active:
                return run(state)
            assert self._state is not None, "a tail layer ran before the first one"
            return calibrated(self._state)

        return forward


class _AffineMap(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        # Product and sum apart: a target then treats the product as it does those without a bias.
        return functional.linear(state, self.weight) + self.bias


def _replace_forward(module: nn.Module, forward: ProjectionForward) -> None:
    module.forward = forward
