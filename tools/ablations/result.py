"""What the ablations found for one model, with all that a figure needs beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.ablations.catalogue import Ablation, AblationName
from pop_engine.tools.ablations.scores import Scored, VariantScores
from pop_engine.tools.evaluation.result import EvalSetting
from pop_engine.tools.evaluation.scores import mean_of
from pop_engine.tools.machine import Machine


@dataclass(frozen=True)
class FitRecord:
    """The text that some were fitted on: a file's name and hash, or `self`, and how many tokens of it."""

    data: str
    sha256: str | None
    num_tokens: int


@dataclass(frozen=True)
class AblationRow:
    """One ablation; without scores, `refused` says why this model has none.

    `layers` are the pruned ones, of those that prune layers; `is_pop` where decode is the full model's.
    """

    name: AblationName
    title: str
    is_pop: bool
    layers: tuple[int, ...]
    scores: VariantScores | None
    refused: str | None = None

    @classmethod
    def of(
        cls, ablation: Ablation, layers: tuple[int, ...], scores: VariantScores | None, refused: str | None = None
    ) -> "AblationRow":
        """An ablation with what was found."""
        return cls(ablation.name, ablation.title, ablation.is_pop, layers, scores, refused)


@dataclass(frozen=True)
class FullScores:
    """The full model over all documents: NLL with the prompt and without it, means and each document's."""

    lines: tuple[int, ...]
    num_answer_tokens: int
    nll: Estimate
    nll_none: Estimate
    nlls: tuple[float, ...]
    nlls_none: tuple[float, ...]

    @classmethod
    def of(cls, documents: Sequence[Scored]) -> "FullScores":
        """Of at least one document."""
        nlls = tuple(document.nll_full for document in documents)
        nlls_none = tuple(document.nll_none for document in documents)
        return cls(
            lines=tuple(document.line for document in documents),
            num_answer_tokens=sum(len(document.answer) for document in documents),
            nll=mean_of(nlls),
            nll_none=mean_of(nlls_none),
            nlls=nlls,
            nlls_none=nlls_none,
        )


@dataclass(frozen=True)
class AblationResult:
    """All of one model. `versions` are those of the packages that computed it."""

    machine: Machine
    versions: dict[str, str]
    setting: EvalSetting
    model: str
    revision: str | None
    num_hidden_layers: int
    num_pruned_layers: int
    fit: FitRecord | None
    full: FullScores
    rows: tuple[AblationRow, ...]


def describe_versions() -> dict[str, str]:
    """The packages that the numbers depend on."""
    return {name: metadata.version(name) for name in ("pop-engine", "torch", "transformers")}
