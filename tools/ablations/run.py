"""The ablations of one model, step by step: model, text, the full model's scores, then one variant after another."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibrate import CalibrationOptions, calibrate, load_model
from pop_engine.builder.analysis.calibration import Calibration, describe_model, load_calibration
from pop_engine.builder.analysis.self_text import SELF
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.export.model import model_dims
from pop_engine.builder.progress import BuildProgress, StepProgress
from pop_engine.builder.quiet import quiet_libraries
from pop_engine.builder.required_packages import require_build_packages
from pop_engine.configs.build_config import BuildConfig, BuildOptions, resolve_build
from pop_engine.configs.calibration import CALIBRATION_NAME
from pop_engine.configs.errors import PopError, UsageError
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.ablations.block_influence import block_influence
from pop_engine.tools.ablations.catalogue import Ablation
from pop_engine.tools.ablations.kept import KeptScores, WorkRecord
from pop_engine.tools.ablations.result import AblationResult, AblationRow, FitRecord, FullScores, describe_versions
from pop_engine.tools.ablations.scores import Scored, score_full, score_variant
from pop_engine.tools.ablations.text import DEFAULT_NUM_TOKENS, FitText, fit_text
from pop_engine.tools.ablations.variants import Subject, prepared
from pop_engine.tools.evaluation.data import Document, EncodeOptions, EvalData, encode_examples, read_examples
from pop_engine.tools.evaluation.options import AblationOptions, EvalOptions
from pop_engine.tools.evaluation.run import make_setting
from pop_engine.tools.evaluation.text import EvalText
from pop_engine.tools.evaluation.work_folder import work_folder
from pop_engine.tools.machine import describe_machine

_NUM_HELD_OUT = 5


def run_ablations(options: EvalOptions) -> AblationResult:
    """Measure every ablation that is asked for. Everything that a file can get wrong is found before the first one."""
    require_build_packages()
    quiet_libraries(verbose=False)
    asked = options.ablations
    assert asked is not None, "only called for ablations"
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    checkpoint = open_checkpoint(BuildConfig(options.subject, Path()))
    plan = _plan(checkpoint, asked)
    data = read_examples(options.data, options.limit)
    with TemporaryDirectory(prefix="pop-eval-") as folder:
        text = EvalText(Path(folder), checkpoint.save_tokenizer(Path(folder)))
    documents = _encode(options, data, text, checkpoint)
    described = describe_model(checkpoint, model_dims(checkpoint.hf_config), plan)
    record = WorkRecord.of(options, asked, described, data)
    with work_folder(asked.work_dir, record) as work, BuildProgress(verbose=False) as progress:
        measuring = _Measuring(_subject(checkpoint, plan, asked, work, progress), KeptScores(work), progress)
        scored = measuring.full(documents, options.max_tokens, frozenset(text.eos_token_ids))
        rows = tuple(measuring.row(ablation, scored) for ablation in asked.ablations)
    return AblationResult(
        machine=describe_machine(),
        versions=describe_versions(),
        setting=make_setting(options, data),
        model=checkpoint.source.name,
        revision=checkpoint.source.revision,
        num_hidden_layers=plan.num_hidden_layers,
        num_pruned_layers=plan.num_tail_layers,
        fit=_fit_record(asked, record),
        full=FullScores.of(scored),
        rows=rows,
    )


def _plan(checkpoint: Checkpoint, asked: AblationOptions) -> PrunePlan:
    options = BuildOptions(tail_layers=asked.tail_layers).over(checkpoint.options)
    plan = resolve_build(options, model_dims(checkpoint.hf_config)).plan
    if not plan.num_tail_layers:
        raise UsageError("--ablations: the model's tail has 0 layers, so nothing would be pruned; give --tail-layers N")
    return plan


def _encode(options: EvalOptions, data: EvalData, text: EvalText, checkpoint: Checkpoint) -> list[Document]:
    longest = model_dims(checkpoint.hf_config).max_position_embeddings
    return encode_examples(data, text, EncodeOptions(options.context_len, options.max_tokens, longest, options.chat))


def _subject(
    checkpoint: Checkpoint, plan: PrunePlan, asked: AblationOptions, work: Path, progress: BuildProgress
) -> Subject:
    with progress.step("model") as advance:
        model = load_model(checkpoint, "fp32", advance)
    fitted = _Fitted(checkpoint, model, plan, asked, work, progress)
    return Subject(model, plan, lambda: fitted.text.token_ids, lambda: fitted.influence, lambda: fitted.calibration)


def _fit_record(asked: AblationOptions, record: WorkRecord) -> FitRecord | None:
    if asked.calibrate is None or not any(ablation.needs_text for ablation in asked.ablations):
        return None
    name = SELF if asked.calibrate == SELF else Path(asked.calibrate).name
    return FitRecord(name, record.calibrate_sha256, asked.calibrate_tokens or DEFAULT_NUM_TOKENS)


@dataclass(frozen=True)
class _Fitted:
    """What is fitted on text, each made when it is first asked for."""

    checkpoint: Checkpoint
    model: PreTrainedModel
    plan: PrunePlan
    asked: AblationOptions
    work: Path
    progress: BuildProgress

    @cached_property
    def text(self) -> FitText:
        assert self.asked.calibrate is not None, "checked with the options"
        num_tokens = self.asked.calibrate_tokens or DEFAULT_NUM_TOKENS
        with self.progress.step("text") as advance:
            return fit_text(self.asked.calibrate, num_tokens, self.checkpoint, self.model, advance)

    @cached_property
    def influence(self) -> list[float]:
        return block_influence(self.model, self.text.token_ids)

    @cached_property
    def calibration(self) -> Calibration:
        """As pop-calibrate makes it. Raises EngineError where it does not help."""
        assert self.asked.calibrate is not None, "checked with the options"
        folder = self.work / "calibration"
        if (folder / CALIBRATION_NAME).is_file():
            return load_calibration(folder)
        num_tokens = self.asked.calibrate_tokens or DEFAULT_NUM_TOKENS
        # Few are held out: the documents that are scored are a check of their own.
        options = CalibrationOptions(self.asked.calibrate, num_tokens, num_held_out=_NUM_HELD_OUT)
        found = calibrate(self.checkpoint, self.plan, options, self.progress)
        found.save(folder)
        return found


@dataclass(frozen=True)
class _Measuring:
    """What every row is measured with. What was measured before is taken from its file."""

    subject: Subject
    kept: KeptScores
    progress: BuildProgress

    def full(self, documents: list[Document], max_tokens: int, stops: frozenset[int]) -> tuple[Scored, ...]:
        found = self.kept.full()
        if found is None:
            with self.progress.step("full model") as advance:
                found = score_full(self.subject.model, documents, max_tokens, stops, advance)
            self.kept.keep_full(found)
        return found

    def row(self, ablation: Ablation, documents: tuple[Scored, ...]) -> AblationRow:
        found = self.kept.row(ablation.name)
        if found is None:
            with self.progress.step(ablation.title) as advance:
                found = self._measure(ablation, documents, advance)
            self.kept.keep_row(found)
        return found

    def _measure(self, ablation: Ablation, documents: tuple[Scored, ...], advance: StepProgress) -> AblationRow:
        """One ablation. What this model cannot have makes a row that says so."""
        try:
            with prepared(ablation.name, self.subject) as variant:
                return AblationRow.of(ablation, variant.layers, score_variant(variant.predict, documents, advance))
        except PopError as error:
            return AblationRow.of(ablation, (), None, str(error))
