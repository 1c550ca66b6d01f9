"""Each ablation made ready: a model that answers as it would, within a context."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibrate import calibrated_reference
from pop_engine.builder.analysis.calibration import Calibration
from pop_engine.builder.reference import Reference
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.ablations.block_influence import least_influential
from pop_engine.tools.ablations.catalogue import AblationName
from pop_engine.tools.ablations.passing import passed_by
from pop_engine.tools.ablations.pop import no_boundary_prediction, pop_prediction
from pop_engine.tools.ablations.positions import first_layers, interleaved_layers, last_layers
from pop_engine.tools.ablations.predict import Predict, plain_prediction
from pop_engine.tools.ablations.slicegpt import sliced
from pop_engine.tools.ablations.tail_kv import no_tail_kv_prediction
from pop_engine.tools.ablations.wanda import wanda_pruned


@dataclass(frozen=True)
class Subject:
    """What is pruned: a model, how many of its layers, and how to get what is fitted on text.

    `token_ids` gives text [B, S], `influence` each layer's Block Influence on it, and `calibration` fits the tail. They
    are asked only where they are needed.
    """

    model: PreTrainedModel
    plan: PrunePlan
    token_ids: Callable[[], torch.Tensor]
    influence: Callable[[], list[float]]
    calibration: Callable[[], Calibration]


@dataclass(frozen=True)
class Variant:
    """A pruned model's predictions, and the layers that are pruned, where it is layers."""

    predict: Predict
    layers: tuple[int, ...] = ()


def prepared(name: AblationName, subject: Subject) -> AbstractContextManager[Variant]:
    """The variant of this name; afterwards the model answers as it did before.

    Raises UsageError or EngineError where it cannot be made of this model.
    """
    return _PREPARE[name](subject)


def _pruning(
    choose: Callable[[PrunePlan], tuple[int, ...]], predict: Callable[[PreTrainedModel, tuple[int, ...]], Predict]
) -> Callable[[Subject], AbstractContextManager[Variant]]:
    """A variant that is decided by its layers and by how they are pruned."""

    def prepare(subject: Subject) -> AbstractContextManager[Variant]:
        layers = choose(subject.plan)
        return nullcontext(Variant(predict(subject.model, layers), layers))

    return prepare


@contextmanager
def _calibrated(subject: Subject) -> Iterator[Variant]:
    layers = last_layers(subject.plan)
    reference = calibrated_reference(Reference(subject.model, subject.plan), subject.calibration().tensors)
    yield Variant(pop_prediction(subject.model, layers, reference.context_rows), layers)


def _remove_last(subject: Subject) -> AbstractContextManager[Variant]:
    return _removed(subject.model, last_layers(subject.plan))


def _shortgpt(subject: Subject) -> AbstractContextManager[Variant]:
    return _removed(subject.model, least_influential(subject.influence(), subject.plan.num_tail_layers))


def _shortgpt_25(subject: Subject) -> AbstractContextManager[Variant]:
    count = max(subject.plan.num_hidden_layers // 4, 1)
    return _removed(subject.model, least_influential(subject.influence(), count))


@contextmanager
def _removed(model: PreTrainedModel, layers: tuple[int, ...]) -> Iterator[Variant]:
    with passed_by(model, layers):
        yield Variant(plain_prediction(model), layers)


@contextmanager
def _slicegpt(subject: Subject) -> Iterator[Variant]:
    with sliced(subject.model, subject.token_ids()):
        yield Variant(plain_prediction(subject.model))


@contextmanager
def _wanda(subject: Subject) -> Iterator[Variant]:
    with wanda_pruned(subject.model, subject.token_ids()):
        yield Variant(plain_prediction(subject.model))


_PREPARE: dict[AblationName, Callable[[Subject], AbstractContextManager[Variant]]] = {
    "calibrated": _calibrated,
    "pop": _pruning(last_layers, pop_prediction),
    "no-boundary": _pruning(last_layers, no_boundary_prediction),
    "interleaved": _pruning(interleaved_layers, pop_prediction),
    "no-tail-kv": _pruning(last_layers, no_tail_kv_prediction),
    "wanda": _wanda,
    "shortgpt-25": _shortgpt_25,
    "shortgpt": _shortgpt,
    "remove-last": _remove_last,
    "slicegpt": _slicegpt,
    "first": _pruning(first_layers, pop_prediction),
}
