"""Fit the tail's K and V projections to what the full model computes, from the trunk's state."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, Piece
from pop_engine.builder.analysis.recording import Recording, recorded, recorded_attention
from pop_engine.builder.analysis.ridge import DEFAULT_RIDGE, RidgeFit
from pop_engine.builder.export.calibrated_tail import bias_name, weight_name
from pop_engine.builder.export.model import model_dims
from pop_engine.builder.export.projections import KeyValueProjections, tail_projections
from pop_engine.configs.errors import EngineError
from pop_engine.configs.prune_plan import PrunePlan

# Every token counts for this much of what an attended one does, so that none is left to chance.
_BACKGROUND = 0.03
# Averages of neighbouring queries are much alike: of so many, one is taken.
_QUERY_STRIDE = 3
# A layer's KV heads are fitted apart, unless the sums of all regressions would take more than this.
_MAX_SUMS_BYTES = 1_000_000_000


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
    num_heads = model_dims(model.config).num_key_value_heads
    fits = [_LayerFit(layer, _num_groups(num_heads, len(tail) - 1, layer.key.in_features)) for layer in tail[1:]]
    for done, piece in enumerate(pieces, 1):
        with recorded(tail) as recording, recorded_attention(model, tail[1:]) as attention:
            model(input_ids=torch.tensor([piece.token_ids]), use_cache=False, logits_to_keep=1)
        for fit in fits:
            _require(recording, attention, fit.layer, type(model).__name__)
            fit.add(recording, context_attention(attention[fit.layer.layer_idx]))
        progress(done, len(pieces))
    tensors: dict[str, torch.Tensor] = {}
    for fit in fits:
        tensors |= fit.solve(ridge)
    return tensors


def context_attention(weights: torch.Tensor) -> torch.Tensor:
    """Attention of a whole sequence, [H, S, S], without what each query gives to the tokens just before it.

    In decoding those are boundary or decoded tokens, whose K and V are right. How many there are depends on where a
    prompt ends; here, one more from each query to the next, up to a continuation's length, and then anew.
    """
    position = torch.arange(weights.shape[-1])
    # A quarter of a short sequence, or its first queries would have no context at all.
    num_right = position % max(min(CONTINUATION_LEN, len(position) // 4), 1)
    return weights * (position[:, None] - position > num_right[:, None])


def _num_groups(num_heads: int, num_layers: int, num_inputs: int) -> int:
    """How many groups of KV heads are fitted apart: all of them, or one where the sums would be too large."""
    num_bytes = 2 * num_layers * num_heads * (num_inputs + 1) ** 2 * torch.float64.itemsize
    return num_heads if num_bytes <= _MAX_SUMS_BYTES else 1


class _LayerFit:
    """One layer's regressions, K's and V's for each group of heads, on what attention makes of errors.

    An error of K shifts the attention that its token gets: K is fitted token by token, each weighted by the attention
    that later queries give it. Errors of V are averaged with that attention before anyone sees them, and what differs
    from token to token is lost: V is fitted on the averages.
    """

    def __init__(self, layer: KeyValueProjections, num_groups: int) -> None:
        self.layer = layer
        self._fits = {
            name: [RidgeFit(projection.in_features, [projection.out_features // num_groups]) for _ in range(num_groups)]
            for name, projection in layer.named()
        }

    def add(self, recording: Recording, attention: torch.Tensor) -> None:
        """Count one sequence in: `attention` is [H, S, S], what queries give to context."""
        assert recording.state is not None
        keys, values = self._fits[self.layer.key_name], self._fits[self.layer.value_name]
        heads = attention.to(recording.state.dtype).chunk(len(keys))
        key, value = (recording.outputs[name].chunk(len(keys), dim=1) for name in self._fits)
        for group, given in enumerate(heads):
            mass = given.sum((0, 1))
            root = (mass + _BACKGROUND * mass.mean()).sqrt()
            keys[group].add(root[:, None] * recording.state, [root[:, None] * key[group]], root)
            averages = given[:, ::_QUERY_STRIDE].flatten(0, 1)
            values[group].add(averages @ recording.state, [averages @ value[group]], averages.sum(1))

    def solve(self, ridge: float) -> dict[str, torch.Tensor]:
        """Weights and biases in fp32, by name."""
        tensors: dict[str, torch.Tensor] = {}
        for name, fits in self._fits.items():
            solutions = [solution for fit in fits for solution in fit.solve(ridge)]
            tensors[weight_name(name)] = torch.cat([weight for weight, _ in solutions]).float()
            tensors[bias_name(name)] = torch.cat([bias for _, bias in solutions]).float()
        return tensors


def _require(
    recording: Recording, attention: dict[int, torch.Tensor], layer: KeyValueProjections, class_name: str
) -> None:
    called = recording.state is not None and all(name in recording.outputs for name, _ in layer.named())
    if not called or layer.layer_idx not in attention:
        what = "return their attention's weights" if called else "call their own K and V projections"
        raise EngineError(
            f"{class_name}: its tail layers do not {what}; its tail cannot be calibrated, so build without calibration"
        )
