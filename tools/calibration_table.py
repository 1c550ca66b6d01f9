"""What a calibrated tail and a boundary window are worth, on held-out documents: a table and its JSON.

    python -m pop_engine.tools.calibration_table -m smollm2-135m --data documents.jsonl --json table.json

For each tail length, the maps are fitted on the documents that are not held out; every variant is scored on the same
held-out continuations (builder/analysis/benefit.py). Documents come from tools/local_text.py or anywhere else.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
from transformers import PreTrainedModel

from pop_engine.builder.analysis.benefit import continuation_nll
from pop_engine.builder.analysis.calibrate import calibrated_reference, load_model
from pop_engine.builder.analysis.corpus import Corpus, CorpusSize, load_tokenizer, text_corpus
from pop_engine.builder.analysis.fit import fit_projections
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.progress import BuildProgress
from pop_engine.builder.quiet import quiet_libraries
from pop_engine.builder.reference import Reference
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.calibration import Estimate
from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.machine import Machine, describe_machine
from pop_engine.tools.table import align_rows


@dataclass(frozen=True)
class TableRow:
    """One variant at one tail length. `nll` is the mean over documents, in nats a token."""

    num_tail_layers: int
    variant: str
    boundary_window: int
    nll: float
    benefit: Estimate | None


@dataclass(frozen=True)
class CalibrationTable:
    """The whole result, with all that a figure needs beside it."""

    machine: Machine
    model: str
    data: str
    sha256: str
    num_fit_tokens: int
    num_documents: int
    context_len: int
    nll_full: float
    nll_without_context: float
    fit_seconds: dict[int, float]
    rows: tuple[TableRow, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("calibration_table", lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="calibration_table", description="Plain POP, calibrated, and with a window.")
    add = parser.add_argument
    add("-m", "--model", required=True, help="preset, checkpoint folder, .gguf file or hub id")
    add("--data", required=True, type=Path, help=".jsonl of documents")
    add("--tail-layers", default="10", metavar="N,N", help="tail lengths (default: 10)")
    add("--windows", default="1,16,64", metavar="W,W", help="boundary windows of the calibrated engine")
    add("--context-len", type=int, default=512)
    add("--num-tokens", type=int, default=33_000, help="to fit on")
    add("--num-documents", type=int, default=20, help="to hold out")
    add("--max-len", type=int, default=576, help="tokens that are read of a document, so that each counts once")
    add("--json", type=Path, metavar="FILE")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    quiet_libraries(verbose=False)
    checkpoint = open_checkpoint(BuildConfig(arguments.model, Path()))
    size = CorpusSize(arguments.num_tokens, arguments.num_documents, arguments.context_len, arguments.max_len)
    with BuildProgress(verbose=False) as progress:
        with progress.step("model") as advance:
            model = load_model(checkpoint, "fp32", advance)
        corpus = text_corpus(arguments.data, load_tokenizer(checkpoint), size)
        tails = [int(length) for length in arguments.tail_layers.split(",")]
        windows = [int(window) for window in arguments.windows.split(",")]
        table = measure(model, checkpoint.source.name, corpus, arguments.context_len, tails, windows, progress)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=2) + b"\n")
    print("\n".join(format_table(table)))
    return 0


def measure(
    model: PreTrainedModel,
    name: str,
    corpus: Corpus,
    context_len: int,
    tails: Sequence[int],
    windows: Sequence[int],
    progress: BuildProgress,
) -> CalibrationTable:
    """Fit and score every tail length."""
    full = Reference(model, PrunePlan(model.config.get_text_config(decoder=True).num_hidden_layers, 0))
    none_scores = [continuation_nll(full, piece, with_context=False) for piece in corpus.held_out]
    full_scores = [continuation_nll(full, piece) for piece in corpus.held_out]
    rows: list[TableRow] = []
    seconds: dict[int, float] = {}
    for length in tails:
        plain = Reference(model, PrunePlan(full.plan.num_hidden_layers, length))
        started = time.perf_counter()
        with progress.step(f"fit {length}") as advance:
            tensors = fit_projections(model, plain.plan, corpus.fit, advance)
        seconds[length] = round(time.perf_counter() - started, 1)
        calibrated = calibrated_reference(plain, tensors)
        variants = [("plain", plain, 1), *(("calibrated", calibrated, window) for window in windows)]
        for variant, reference, window in variants:
            with progress.step(f"{variant} {length}, window {window}"):
                scores = [continuation_nll(reference, piece, window) for piece in corpus.held_out]
            benefit = Estimate.of_benefit(none_scores, scores, full_scores)
            rows.append(TableRow(length, variant, window, mean(scores), benefit))
            print(f"{length} {variant} {window}: {benefit}", file=sys.stderr, flush=True)
    return CalibrationTable(
        describe_machine(), name, corpus.name, corpus.sha256, corpus.num_fit_tokens, len(corpus.held_out), context_len,
        mean(full_scores), mean(none_scores), seconds, tuple(rows),
    )  # fmt: skip


def format_table(table: CalibrationTable) -> list[str]:
    """The table for people."""
    cells = [["tail", "variant", "window", "NLL", "benefit kept"]]
    for row in table.rows:
        figures = [str(row.boundary_window), f"{row.nll:.4f}", str(row.benefit)]
        cells.append([str(row.num_tail_layers), row.variant, *figures])
    head = (
        f"{table.model}: {table.num_documents} held-out documents, contexts of {table.context_len} tokens, fitted on "
        f"{table.num_fit_tokens} tokens; NLL {table.nll_full:.4f} in full, {table.nll_without_context:.4f} without"
    )
    return [head, *align_rows(cells, frozenset({0, 2, 3}))]


if __name__ == "__main__":
    sys.exit(main())
