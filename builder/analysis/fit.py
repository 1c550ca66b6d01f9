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
    num_bytes = num_layers * num_heads * (num_inputs + 1) ** 2 * torch.float64.itemsize
    return num_heads if num_bytes <= _MAX_SUMS_BYTES else 1


class _LayerFit:
    """One layer's regressions, of K and V for each group of heads.

    An error of K or V matters as much as its token is attended to, so tokens are weighted by the attention that later
    queries give them. Most of it goes to few tokens, the first one above all.
    """

    def __init__(self, layer: KeyValueProjections, num_groups: int) -> None:
        self.layer = layer
        sizes = [projection.out_features // num_groups for _, projection in layer.named()]
        self._fits = [RidgeFit(layer.key.in_features, sizes) for _ in range(num_groups)]

    def add(self, recording: Recording, attention: torch.Tensor) -> None:
        """Count one sequence in: `attention` is [H, S, S], what queries give to context."""
        assert recording.state is not None
        outputs = [recording.outputs[name].chunk(len(self._fits), dim=1) for name, _ in self.layer.named()]
        heads = attention.to(recording.state.dtype).chunk(len(self._fits))
        for fit, given, *own in zip(self._fits, heads, *outputs, strict=True):
            mass = given.sum((0, 1))
            root = (mass + _BACKGROUND * mass.mean()).sqrt()
            fit.add(root[:, None] * recording.state, [root[:, None] * output for output in own], root)

    def solve(self, ridge: float) -> dict[str, torch.Tensor]:
        """Weights and biases in fp32, by name."""
        tensors: dict[str, torch.Tensor] = {}
        solutions = zip(*(fit.solve(ridge) for fit in self._fits), strict=True)
        for (name, _), groups in zip(self.layer.named(), solutions, strict=True):
            tensors[weight_name(name)] = torch.cat([weight for weight, _ in groups]).float()
            tensors[bias_name(name)] = torch.cat([bias for _, bias in groups]).float()
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
