"""The held-out check: calibration must bring K and V closer to the model's, and the model's predictions too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from transformers import DynamicCache

from pop_engine.builder.analysis.benefit import continuation_nll, decoded_nll
from pop_engine.builder.analysis.corpus import Piece
from pop_engine.builder.analysis.recording import recorded
from pop_engine.builder.export.projections import KeyValueProjections, tail_projections
from pop_engine.builder.reference import Reference, pruned_prefill
from pop_engine.configs.calibration import Estimate, LayerGain, ProjectionError
from pop_engine.configs.errors import EngineError
from pop_engine.configs.prune_plan import PrunePlan


@dataclass(frozen=True)
class HeldOutCheck:
    """What held-out text says of a calibration. NLL is the mean over documents."""

    layers: tuple[LayerGain, ...]
    nll_plain: float
    nll_calibrated: float
    benefit_plain: Estimate | None
    benefit_calibrated: Estimate | None

    def require_gain(self) -> None:
        """Raise EngineError unless calibration helps: it is never applied on trust."""
        before = mean(error.plain for layer in self.layers for error in (layer.key, layer.value))
        after = mean(error.calibrated for layer in self.layers for error in (layer.key, layer.value))
        if not after < before:
            raise EngineError(
                f"calibration refused: on held-out text K and V are off by {after:.3g} of their variance, "
                f"without it by {before:.3g}; calibrate on more text, or on text like your prompts"
            )
        if not self.nll_calibrated < self.nll_plain:
            raise EngineError(
                f"calibration refused: held-out continuations cost {self.nll_calibrated:.4f} nats a token, without "
                f"it {self.nll_plain:.4f}; calibrate on more text, or on text like your prompts"
            )


def check_held_out(
    plain: Reference, calibrated: Reference, pieces: Sequence[Piece], progress: Callable[[int, int], None]
) -> HeldOutCheck:
    """Compare plain and calibrated POP, of one model, with the full model on text that nothing was fitted on."""
    full = Reference(plain.model, PrunePlan(plain.plan.num_hidden_layers, 0))
    tail = tail_projections(plain.model, plain.plan)
    errors = _ProjectionErrors(tail[1:])
    scores: list[tuple[float, ...]] = []
    for done, piece in enumerate(pieces, 1):
        (whole, truth), (before, pruned), (after, mapped) = (
            _score(reference, piece, tail) for reference in (full, plain, calibrated)
        )
        errors.add(truth, pruned, mapped)
        scores.append((continuation_nll(full, piece, with_context=False), whole, before, after))
        progress(done, len(pieces))
    without, full_scores, plain_scores, calibrated_scores = zip(*scores, strict=True)
    return HeldOutCheck(
        layers=errors.gains(),
        nll_plain=mean(plain_scores),
        nll_calibrated=mean(calibrated_scores),
        benefit_plain=Estimate.of_benefit(without, plain_scores, full_scores),
        benefit_calibrated=Estimate.of_benefit(without, calibrated_scores, full_scores),
    )


Outputs = dict[str, torch.Tensor]


@torch.no_grad()
def _score(reference: Reference, piece: Piece, tail: Sequence[KeyValueProjections]) -> tuple[float, Outputs]:
    """What `continuation_nll` gives, and K and V of the context."""
    cache, prompt = DynamicCache(config=reference.model.config), [*piece.prefix, *piece.context]
    with recorded(tail) as recording:
        pruned_prefill(reference, prompt[:-1], cache)
    return decoded_nll(reference.model, cache, prompt[-1:], piece.continuation), recording.outputs


class _ProjectionErrors:
    """Sums of squares over documents: of each projection around its mean, and of what both prefills get wrong."""

    def __init__(self, layers: Sequence[KeyValueProjections]) -> None:
        self._layers = layers
        names = [name for layer in layers for name, _ in layer.named()]
        self._spread = dict.fromkeys(names, 0.0)
        self._plain = dict.fromkeys(names, 0.0)
        self._calibrated = dict.fromkeys(names, 0.0)

    def add(self, truth: Outputs, plain: Outputs, calibrated: Outputs) -> None:
        for name in self._spread:
            expected = truth[name].double()
            self._spread[name] += float((expected - expected.mean(0)).square().sum())
            self._plain[name] += float((plain[name].double() - expected).square().sum())
            self._calibrated[name] += float((calibrated[name].double() - expected).square().sum())

    def gains(self) -> tuple[LayerGain, ...]:
        return tuple(
            LayerGain(layer.layer_idx, self._error(layer.key_name), self._error(layer.value_name))
            for layer in self._layers
        )

    def _error(self, name: str) -> ProjectionError:
        spread = max(self._spread[name], torch.finfo(torch.float64).tiny)
        return ProjectionError(self._plain[name] / spread, self._calibrated[name] / spread)
