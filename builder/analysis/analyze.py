"""Analyze a model's layers, step by step: model, prompts, then sample by sample."""

import importlib.metadata
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibrate import load_model
from pop_engine.builder.analysis.calibration import describe_model
from pop_engine.builder.analysis.corpus import load_tokenizer
from pop_engine.builder.analysis.gates import check_gates
from pop_engine.builder.analysis.importance import (
    GateGradients,
    gate_gradients,
    importance,
    mean_output_tokens,
    tail_losses,
)
from pop_engine.builder.analysis.journal import Journal
from pop_engine.builder.analysis.prompts import Prompts, SampleSize, file_prompts, self_prompts
from pop_engine.builder.analysis.self_text import SELF
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.export.model import model_dims
from pop_engine.builder.progress import BuildProgress, StepProgress
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import DType
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import ImportanceRecord


@dataclass(frozen=True)
class AnalysisOptions:
    """What to analyze on: a .txt or .jsonl file or `self`, and how much of it."""

    data: str = SELF
    num_samples: int = 200
    max_len: int = 512
    output_len: int = 64
    seed: int = 0
    dtype: DType = "fp32"

    def __post_init__(self) -> None:
        for name, least in (("num_samples", 2), ("output_len", 1), ("seed", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} {getattr(self, name)}: expected a whole number of at least {least}")
        if self.max_len < self.output_len + 2:
            raise UsageError(
                f"--max-len {self.max_len}: expected at least {self.output_len + 2}, a prompt of two tokens and "
                f"--output-len {self.output_len}"
            )


def analyze(
    checkpoint: Checkpoint, options: AnalysisOptions, journal_path: Path, progress: BuildProgress
) -> ImportanceRecord:
    """Both importance curves. Samples that `journal_path` holds of the same options are not done again.

    The same options give the same record to the bit, on the same machine with as many threads. Raises UsageError
    where the model or the text does not allow it.
    """
    dims = model_dims(checkpoint.hf_config)
    size = _size(checkpoint, options, dims)
    fingerprint = describe_model(checkpoint, dims, PrunePlan(dims.num_hidden_layers, 0)).fingerprint
    with progress.step("text"):
        prompts = _prompts(checkpoint, options, size)
    with progress.step("model") as advance:
        model = load_model(checkpoint, options.dtype, advance)
        model.requires_grad_(requires_grad=False)
        check_gates(model)
    key = _key(fingerprint, prompts, options, size)
    with progress.step("samples") as advance, Journal(journal_path, key) as journal:
        samples = _run_samples(model, prompts, options.seed, dims.num_hidden_layers, journal, advance)
    return ImportanceRecord(
        model=checkpoint.source.name,
        fingerprint=fingerprint,
        data=prompts.name,
        sha256=prompts.sha256,
        seed=options.seed,
        dtype=options.dtype,
        num_samples=len(samples),
        max_len=size.max_len,
        output_len=size.output_len,
        mean_output_tokens=mean_output_tokens(samples),
        prefill=importance([sample.prefill for sample in samples]),
        decode=importance([sample.decode for sample in samples]),
        tail_loss=tail_losses(samples),
    )


def _size(checkpoint: Checkpoint, options: AnalysisOptions, dims: ModelDims) -> SampleSize:
    longest = dims.max_position_embeddings
    if longest < options.output_len + 2:
        raise UsageError(
            f"{checkpoint.source.name}: trained for {longest} positions, too few for a prompt and "
            f"--output-len {options.output_len}"
        )
    return SampleSize(options.num_samples, min(options.max_len, longest), options.output_len)


def _prompts(checkpoint: Checkpoint, options: AnalysisOptions, size: SampleSize) -> Prompts:
    if options.data == SELF:
        return self_prompts(checkpoint.hf_config, size)
    return file_prompts(Path(options.data), load_tokenizer(checkpoint), checkpoint.hf_config, size)


def _key(fingerprint: str | None, prompts: Prompts, options: AnalysisOptions, size: SampleSize) -> dict[str, str]:
    """All that a sample's numbers depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("pop-engine", "torch", "transformers")}
    inputs = {"model": fingerprint, "prompts": prompts.sha256, "threads": torch.get_num_threads()}
    return {name: str(value) for name, value in (asdict(options) | asdict(size) | inputs | versions).items()}


def _run_samples(
    model: PreTrainedModel, prompts: Prompts, seed: int, num_layers: int, journal: Journal, advance: StepProgress
) -> list[GateGradients]:
    start = 0
    for number, group in enumerate(prompts.groups):
        indices = range(start, start + len(group.given))
        start = indices.stop
        if all(index in journal.found for index in indices):
            continue
        # Of the group alone, so that it is the same whether or not those before it were sampled in this run.
        state = np.random.SeedSequence([seed, number]).generate_state(1)
        generator = torch.Generator().manual_seed(int(state[0]))
        for index, sample in zip(indices, group.samples(model, generator), strict=True):
            if index not in journal.found:
                journal.add(index, gate_gradients(model, sample, num_layers))
            advance(index + 1, prompts.num_samples)
    return [journal.found[index] for index in range(prompts.num_samples)]
