"""Calibrate a model's tail, step by step: text, fit, held-out check."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibration import Calibration, describe_model
from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, Corpus, CorpusSize, load_tokenizer, text_corpus
from pop_engine.builder.analysis.fit import fit_projections
from pop_engine.builder.analysis.held_out import check_held_out
from pop_engine.builder.analysis.ridge import DEFAULT_RIDGE
from pop_engine.builder.analysis.self_text import SELF, self_corpus
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.layout import match_tensors
from pop_engine.builder.export.calibrated_tail import CalibratedTail, calibrated_shapes
from pop_engine.builder.export.model import TORCH_DTYPES, model_dims, parameter_shapes
from pop_engine.builder.progress import BuildProgress, StepProgress
from pop_engine.builder.reference import Reference, assemble_model
from pop_engine.configs.calibration import CalibrationRecord
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import DType
from pop_engine.configs.prune_plan import PrunePlan


@dataclass(frozen=True)
class CalibrationOptions:
    """What to calibrate on: a .txt or .jsonl file or `self`, and how much of it."""

    data: str
    num_tokens: int = 33_000
    context_len: int = 512
    max_len: int | None = None
    num_held_out: int = 20
    seed: int = 0
    dtype: DType = "fp32"

    def __post_init__(self) -> None:
        for name in ("num_tokens", "context_len", "max_len", "num_held_out"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least 1")


def calibrate(
    checkpoint: Checkpoint, plan: PrunePlan, options: CalibrationOptions, progress: BuildProgress
) -> Calibration:
    """Fit and check: a calibration that exists is one that passed.

    Raises UsageError where the model or the text does not allow it, EngineError where it does not help.
    """
    dims = model_dims(checkpoint.hf_config)
    with progress.step("model") as advance:
        model = load_model(checkpoint, options.dtype, advance)
        calibrated_shapes(model, plan)
        described = describe_model(checkpoint, dims, plan)
    with progress.step("text") as advance:
        corpus = calibration_corpus(checkpoint, model, options, advance)
    with progress.step("fit") as advance:
        tensors = fit_projections(model, plan, corpus.fit, advance)
    with progress.step("held-out check") as advance:
        plain = Reference(model, plan)
        check = check_held_out(plain, calibrated_reference(plain, tensors), corpus.held_out, advance)
        check.require_gain()
    record = CalibrationRecord(
        data=corpus.name,
        sha256=corpus.sha256,
        num_tokens=corpus.num_fit_tokens,
        context_len=options.context_len,
        ridge=DEFAULT_RIDGE,
        num_held_out=len(corpus.held_out),
        layers=check.layers,
        nll_plain=check.nll_plain,
        nll_calibrated=check.nll_calibrated,
        benefit_plain=check.benefit_plain,
        benefit_calibrated=check.benefit_calibrated,
    )
    return Calibration(described, record, tensors)


def load_model(checkpoint: Checkpoint, dtype: DType, advance: StepProgress) -> PreTrainedModel:
    """The checkpoint's model in memory. Raises UsageError where there are no weights."""
    if checkpoint.tensors is None:
        raise UsageError(f"{checkpoint.source.name}: opened without weights, there is nothing to calibrate")
    parameters = parameter_shapes(checkpoint.hf_config)
    stored = match_tensors(parameters, checkpoint.tensors, checkpoint.source.location)
    tensors: dict[str, torch.Tensor] = {}
    for done, (name, tensor) in enumerate(stored.items(), 1):
        tensors[name] = tensor.read().to(TORCH_DTYPES[dtype])
        advance(done, len(stored))
    return assemble_model(checkpoint.hf_config, dtype, tensors)


def calibrated_reference(plain: Reference, tensors: dict[str, torch.Tensor]) -> Reference:
    """The same model with a calibrated tail, which leaves the plain reference as it is."""
    dtype = next(plain.model.parameters()).dtype
    parameters = {name: nn.Parameter(tensor.to(dtype), requires_grad=False) for name, tensor in tensors.items()}
    tail = CalibratedTail(plain.model, plain.plan, parameters)
    return Reference(plain.model, plain.plan, tail.context_rows)


def calibration_corpus(
    checkpoint: Checkpoint, model: PreTrainedModel, options: CalibrationOptions, advance: StepProgress
) -> Corpus:
    """The text in pieces, or what the model says of itself. Raises UsageError where there is too little of it."""
    longest = model_dims(checkpoint.hf_config).max_position_embeddings
    # Room for the prefix and the continuation.
    context_len = min(options.context_len, longest - CONTINUATION_LEN - 2)
    if context_len < 1:
        raise UsageError(f"{checkpoint.source.name}: trained for {longest} positions, too few to calibrate on")
    size = CorpusSize(options.num_tokens, options.num_held_out, context_len, options.max_len)
    if options.data == SELF:
        return self_corpus(model, size, options.seed, advance)
    return text_corpus(Path(options.data), load_tokenizer(checkpoint), size)
