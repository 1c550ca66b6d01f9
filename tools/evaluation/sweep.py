"""Engines of several tail lengths, plain and calibrated, built and measured one after another."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from pop_engine.configs.errors import PopError, UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.evaluation.data import EvalData, read_examples
from pop_engine.tools.evaluation.measure import FullRun, Worker, document_scores, run_full, run_pop
from pop_engine.tools.evaluation.options import EvalOptions, SweepOptions
from pop_engine.tools.evaluation.pair import check_pair
from pop_engine.tools.evaluation.result import (
    EvalEngine,
    SweepResult,
    SweepRow,
    describe_engine,
    is_within,
    longest_within,
)
from pop_engine.tools.evaluation.run import encode, make_setting, make_workload, require_weights, start_worker
from pop_engine.tools.evaluation.scores import losses_by_position, summarize
from pop_engine.tools.evaluation.sweep_engines import SweepEngines, work_record
from pop_engine.tools.evaluation.text import EvalText
from pop_engine.tools.evaluation.work_folder import work_folder
from pop_engine.tools.machine import describe_machine


def sweep(options: EvalOptions) -> SweepResult:
    """Build the full engine and those of all tails, and measure each as `evaluate` does."""
    sweep_options = options.sweep
    assert sweep_options is not None, "only called for a sweep"
    data = read_examples(options.data, options.limit)
    record = work_record(options.subject, sweep_options)
    with work_folder(sweep_options.work_dir, record) as work, TemporaryDirectory(prefix="pop-eval-") as folder:
        engines = SweepEngines(options.subject, sweep_options, work)
        full_path = Path(options.against or engines.engine(0, calibrated=False))
        full = Manifest.load(full_path)
        require_weights(str(full_path), full)
        _check_tails(sweep_options, full)
        text = EvalText(full_path, full.tokenizer)
        workload = make_workload(encode(options, data, text, full), options, full)
        with start_worker(full_path, options) as full_worker:
            full_run = run_full(full_worker, workload, Path(folder))
            measuring = _Measuring(options, engines, text, full, full_run, full_worker)
            rows = tuple(measuring.row(*variant) for variant in _variants(sweep_options))
    return _result(options, data, describe_engine(str(full_path), full, full_worker.peak_memory_bytes), rows)


def _result(options: EvalOptions, data: EvalData, full: EvalEngine, rows: tuple[SweepRow, ...]) -> SweepResult:
    assert options.sweep is not None
    return SweepResult(
        machine=describe_machine(),
        setting=make_setting(options, data),
        full=full,
        calibrate=options.sweep.calibrate,
        boundary_window=options.sweep.boundary_window,
        rows=rows,
        longest=longest_within(rows),
    )


def _variants(options: SweepOptions) -> list[tuple[int, bool]]:
    """Tail lengths, plain and, where there is a tail to calibrate, calibrated."""
    return [
        (length, calibrated)
        for length in options.tail_layers
        for calibrated in (False, True)
        if not calibrated or (options.calibrate is not None and length)
    ]


def _check_tails(options: SweepOptions, full: Manifest) -> None:
    most = full.plan.num_hidden_layers - 1
    if options.tail_layers[-1] > most:
        raise UsageError(f"--sweep {options.tail_layers[-1]}: the model has {most + 1} layers; give {most} at most")


@dataclass(frozen=True)
class _Measuring:
    """What every row is measured with."""

    options: EvalOptions
    engines: SweepEngines
    text: EvalText
    full: Manifest
    full_run: FullRun
    full_worker: Worker

    def row(self, num_tail_layers: int, calibrated: bool) -> SweepRow:
        """Build and measure one engine. A calibration that is refused makes a row that says so."""
        try:
            path = self.engines.engine(num_tail_layers, calibrated=calibrated)
        except PopError as error:
            if not calibrated:
                raise
            return SweepRow(num_tail_layers, True, None, None, (), (), str(error))
        manifest = Manifest.load(path)
        check_pair(str(path), manifest, str(self.options.against), self.full)
        title = f"{num_tail_layers} tail layers{', calibrated' if calibrated else ''}"
        with start_worker(path, self.options) as worker:
            run = run_pop(worker, self.full_worker, self.full_run, title)
        self.engines.release(path)
        documents = document_scores(self.full_run, run, self.text)
        scores = summarize(documents)
        positions = losses_by_position(self.full_run.scores, run.scores, self.full_run.none_scores)
        within = is_within(scores.benefit, self.options.max_loss)
        return SweepRow(num_tail_layers, calibrated, within, scores, positions, documents)
