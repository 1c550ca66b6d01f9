"""What a calibrated tail and a boundary window are worth, on documents that no calibration saw.

    python -m pop_engine.tools.local_text -o documents.jsonl
    python -m pop_engine.tools.calibration_table -m smollm2-135m --data documents.jsonl --json table.json

Some documents are set apart; pop-calibrate runs on the others as a user would run it, once for each tail length, and
its time and memory are taken. Then every variant is scored on the same continuations (builder/analysis/benefit.py).
Tail lengths that the JSON file has already, of the same text and options, are kept and not measured again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import eq
from pathlib import Path
from statistics import fmean

import msgspec
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibrate import calibrated_reference, load_model
from pop_engine.builder.analysis.calibration import Calibration
from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, load_tokenizer, read_documents
from pop_engine.builder.analysis.self_text import SELF
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.progress import BuildProgress
from pop_engine.builder.quiet import quiet_libraries
from pop_engine.builder.reference import Reference
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.calibration import Estimate
from pop_engine.configs.errors import UsageError, exit_with_message
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.whole_file import write_json
from pop_engine.tools.calibration_runs import CalibrationRun, run_pop_calibrate
from pop_engine.tools.command_line import check_writable, parse_count, parse_counts
from pop_engine.tools.continuation_scores import DocumentScorer, Scores
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows


@dataclass(frozen=True)
class Setting:
    """What is scored, and on what: results of one setting can be compared, and stand in one file.

    `fitted_on` is `text`, the documents that are not scored, or `self`.
    """

    model: str
    data: str
    sha256: str
    fitted_on: str
    num_tokens: int
    num_documents: int
    context_lens: tuple[int, ...]
    windows: tuple[int, ...]


@dataclass(frozen=True)
class TableRow:
    """One variant after one length of context. `nll` is the mean over documents, in nats a token.

    `agreement` is how often the first choice is the full model's.
    """

    num_tail_layers: int
    context_len: int
    variant: str
    boundary_window: int
    nll: float
    benefit: Estimate | None
    agreement: Estimate | None


@dataclass(frozen=True)
class CalibrationTable:
    """The whole result, with all that a figure needs beside it. Both NLL are by length of context."""

    machine: Machine
    setting: Setting
    weight_bytes: int
    nll_full: dict[int, float]
    nll_without_context: dict[int, float]
    runs: dict[int, CalibrationRun]
    rows: tuple[TableRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("calibration_table", lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="calibration_table", description="Plain POP, calibrated, and with a window.")
    add = parser.add_argument
    add("-m", "--model", required=True, help="preset, checkpoint folder, .gguf file or hub id")
    add("--data", required=True, type=Path, help=".jsonl of documents")
    add("--fit-on", choices=("text", SELF), default="text", help="what pop-calibrate gets (default: text)")
    add("--tail-layers", type=parse_counts, default="10", metavar="N,N", help="tail lengths (default: 10)")
    add("--windows", type=parse_counts, default="1,16,64", metavar="W,W", help="windows of the calibrated engine")
    add("--context-lens", type=parse_counts, default="256,512,1024", metavar="N,N", help="tokens of context")
    add("--num-tokens", type=parse_count, default=33_000, help="to fit on")
    add("--num-documents", type=parse_count, default=40, help="to score")
    add("--json", type=Path, metavar="FILE", help="where the result goes, and tail lengths measured before are")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    quiet_libraries(verbose=False)
    check_writable("--json", arguments.json)
    checkpoint = open_checkpoint(BuildConfig(arguments.model, Path()))
    setting = _setting(arguments, checkpoint.source.name)
    found = _read(arguments.json, setting)
    lengths = [length for length in arguments.tail_layers if found is None or length not in found.runs]
    tokenizer, texts = load_tokenizer(checkpoint), read_documents(arguments.data)
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    scored = choose_documents(list(map(len, tokens)), setting)
    scorer = DocumentScorer(tuple(tokenizer.encode("").ids), [tokens[i] for i in scored], setting.context_lens)
    fit_texts = [text for index, text in enumerate(texts) if index not in scored]
    with BuildProgress(verbose=True) as progress, tempfile.TemporaryDirectory() as folder:
        runs = {
            length: _calibrate(arguments.model, setting, fit_texts, length, Path(folder), progress)
            for length in lengths
        }
        with progress.step("model") as advance:
            model = load_model(checkpoint, "fp32", advance)
        table = measure(model, setting, scorer, runs, progress)
    table = table if found is None else _merge(found, table)
    if arguments.json is not None:
        write_json(arguments.json, table)
    print("\n".join(format_table(table)))
    return 0


def _setting(arguments: argparse.Namespace, model: str) -> Setting:
    content = arguments.data.read_bytes()
    sizes = (arguments.num_tokens, arguments.num_documents, arguments.context_lens, arguments.windows)
    return Setting(model, arguments.data.name, sha256(content).hexdigest(), arguments.fit_on, *sizes)


def _read(path: Path | None, setting: Setting) -> CalibrationTable | None:
    """What was measured before, in the same setting."""
    if path is None or not path.is_file():
        return None
    table = msgspec.json.decode(path.read_bytes(), type=CalibrationTable)
    if table.setting != setting:
        raise UsageError(f"--json {path}: holds results of other options or another text; choose another file")
    return table


def _merge(before: CalibrationTable, after: CalibrationTable) -> CalibrationTable:
    rows = sorted((*before.rows, *after.rows), key=lambda row: (row.num_tail_layers, row.context_len))
    return replace(after, runs=before.runs | after.runs, rows=tuple(rows))


def choose_documents(lengths: Sequence[int], setting: Setting) -> set[int]:
    """Indices of the documents to score, evenly spread among those that are long enough.

    Raises UsageError where there are too few, or none would be left to fit on.
    """
    needed = max(setting.context_lens) + CONTINUATION_LEN
    long = [index for index, length in enumerate(lengths) if length >= needed]
    count = setting.num_documents
    if len(long) < count or len(lengths) == count:
        raise UsageError(
            f"--data {setting.data}: {len(long)} of {len(lengths)} documents have {needed} tokens; expected at least "
            f"{count}, and others to fit on"
        )
    return {long[(2 * place + 1) * len(long) // (2 * count)] for place in range(count)}


def _calibrate(
    model: str, setting: Setting, texts: Sequence[str], num_tail_layers: int, folder: Path, progress: BuildProgress
) -> tuple[Calibration, CalibrationRun]:
    data = SELF
    if setting.fitted_on != SELF:
        (folder / "fit.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        data = str(folder / "fit.jsonl")
    with progress.step(f"pop-calibrate --tail-layers {num_tail_layers}"):
        return run_pop_calibrate(model, data, num_tail_layers, setting.num_tokens, folder / str(num_tail_layers))


def measure(
    model: PreTrainedModel,
    setting: Setting,
    scorer: DocumentScorer,
    runs: Mapping[int, tuple[Calibration, CalibrationRun]],
    progress: BuildProgress,
) -> CalibrationTable:
    """Score the full model, and plain and calibrated POP at every tail length."""
    full = Reference(model, PrunePlan(model.config.get_text_config(decoder=True).num_hidden_layers, 0))
    with progress.step("full model") as advance:
        without, whole = scorer.without_context(full), scorer.scores(full, (1,), advance)
    rows: list[TableRow] = []
    for length, (calibration, _) in runs.items():
        plain = Reference(model, PrunePlan(full.plan.num_hidden_layers, length))
        variants = {
            "plain": (plain, (1,)),
            "calibrated": (calibrated_reference(plain, calibration.tensors), setting.windows),
        }
        for variant, (reference, windows) in variants.items():
            with progress.step(f"{length} tail layers, {variant}") as advance:
                scores = scorer.scores(reference, windows, advance)
            rows += [
                _row(length, variant, context_len, window, without[context_len], scores, whole)
                for context_len in setting.context_lens
                for window in windows
            ]
    return CalibrationTable(
        machine=describe_machine(),
        setting=setting,
        weight_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        nll_full={length: fmean(scores[length, 1].nll for scores in whole) for length in setting.context_lens},
        nll_without_context={length: fmean(values) for length, values in without.items()},
        runs={length: run for length, (_, run) in runs.items()},
        rows=tuple(rows),
    )


def _row(
    num_tail_layers: int,
    variant: str,
    context_len: int,
    window: int,
    without: Sequence[float],
    scores: Sequence[Scores],
    whole: Sequence[Scores],
) -> TableRow:
    found, golden = [score[context_len, window] for score in scores], [score[context_len, 1] for score in whole]
    nlls = [score.nll for score in found]
    same = [
        sum(map(eq, score.choices, other.choices)) / len(other.choices)
        for score, other in zip(found, golden, strict=True)
    ]
    benefit = Estimate.of_benefit(without, nlls, [score.nll for score in golden])
    agreement = Estimate.of_ratio(same, [1.0] * len(same))
    return TableRow(num_tail_layers, context_len, variant, window, fmean(nlls), benefit, agreement)


def format_table(table: CalibrationTable) -> list[str]:
    """The table for people."""
    setting = table.setting
    lines = [
        f"{setting.model}: {setting.num_documents} documents of {setting.data}, fitted on {setting.fitted_on}",
        *(f"context {length}: NLL {nll:.4f} in full, {table.nll_without_context[length]:.4f} without"
          for length, nll in table.nll_full.items()),
        *(f"{length} tail layers: calibrated on {run.num_tokens} tokens in {run.seconds:.0f} s, peak "
          f"{run.peak_memory_bytes / 1e6:.0f} MB (weights {table.weight_bytes / 1e6:.0f} MB)"
          for length, run in table.runs.items()),
    ]  # fmt: skip
    cells = [["tail", "context", "variant", "window", "NLL", "benefit kept", "first choice kept"]]
    for row in table.rows:
        places = [str(row.num_tail_layers), str(row.context_len), row.variant, str(row.boundary_window)]
        cells.append([*places, f"{row.nll:.4f}", str(row.benefit), str(row.agreement)])
    return [*lines, *align_rows(cells, frozenset({0, 1, 3, 4}))]


if __name__ == "__main__":
    sys.exit(main())
