"""Fit the tail's K and V projections to what the full model computes, from the trunk's state."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.corpus import Piece
from pop_engine.builder.analysis.recording import recorded
from pop_engine.builder.analysis.ridge import DEFAULT_RIDGE, RidgeFit
from pop_engine.builder.export.calibrated_tail import bias_name, weight_name
from pop_engine.builder.export.projections import tail_projections
from pop_engine.configs.errors import EngineError
from pop_engine.configs.prune_plan import PrunePlan


@torch.no_grad()
def fit_projections(
    model: PreTrainedModel,
    plan: PrunePlan,
    pieces: Sequence[Piece],
    progress: Callable[[int, int], None],
    ridge: float = DEFAULT_RIDGE,
) -> dict[str, torch.Tensor]:
    """Weights and biases in fp32, named as CalibratedTail wants them.

    For each tail layer but the first: the affine map from what the first one's projections read to the layer's own K
    and V, before k_norm and RoPE, in the full model. One sequence's activations are held at a time.
    """
    tail = tail_projections(model, plan)
    names = [name for layer in tail[1:] for name, _ in layer.named()]
    sizes = [projection.out_features for layer in tail[1:] for _, projection in layer.named()]
    fit = RidgeFit(tail[0].key.in_features, sizes)
    for done, piece in enumerate(pieces, 1):
        with recorded(tail) as recording:
            model(input_ids=torch.tensor([piece.token_ids]), use_cache=False, logits_to_keep=1)
        if recording.state is None or any(name not in recording.outputs for name in names):
            raise EngineError(
                f"{type(model).__name__}: its tail layers do not call their own K and V projections; "
                "its tail cannot be calibrated, so build without calibration"
            )
        fit.add(recording.state, [recording.outputs[name] for name in names])
        progress(done, len(pieces))
    tensors: dict[str, torch.Tensor] = {}
    for name, (weight, bias) in zip(names, fit.solve(ridge), strict=True):
        tensors[weight_name(name)], tensors[bias_name(name)] = weight.float(), bias.float()
    return tensors
