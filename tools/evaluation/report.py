"""The report of an evaluation: its scores, plots and worst cases on one page."""

from collections.abc import Sequence

from pop_engine.tools.evaluation.difference import mark_differences
from pop_engine.tools.evaluation.page import Case, Figure, Page, Table, render
from pop_engine.tools.evaluation.plots import loss_by_document, loss_by_position, tail_lengths, trade_off
from pop_engine.tools.evaluation.result import EvalEngine, EvalResult, SweepResult, SweepRow
from pop_engine.tools.evaluation.scores import DocumentScore
from pop_engine.tools.evaluation.svg import Plot, draw
from pop_engine.tools.evaluation.table import (
    describe_machine_line,
    describe_setting,
    describe_subject,
    format_benefit,
    score_rows,
    sweep_verdict,
    tail_name,
    verdict,
    with_error,
)

NUM_CASES = 6
_PROMPT_CHARACTERS = 2000
_SWEEP_HEADER = (
    "tail", "benefit kept", "NLL", "KL", "top-1", "first token", "equal answers", "TTFT, ms", "TTFT ratio",
)  # fmt: skip
_DOCUMENT_HEADER = (
    "line", "prompt", "answer", "NLL full", "NLL POP", "NLL none", "KL", "top-1", "equal tokens", "TTFT full, ms",
    "TTFT POP, ms",
)  # fmt: skip
_BENEFIT_NOTE = (
    "Benefit kept: the share of (NLL without context − NLL of the full model) that POP keeps. NLL and KL are in nats "
    "a token of the answer."
)


def result_page(result: EvalResult) -> str:
    """One engine against the full one, as HTML text."""
    setting = result.setting
    return render(
        Page(
            title=f"pop-eval: {result.pop.model}, {result.pop.num_tail_layers} tail layers",
            facts=[
                describe_subject(result.pop),
                describe_setting(setting, result.scores.num_answer_tokens),
                *_engine_facts(result.pop, "POP"),
                *_engine_facts(result.full, "full"),
                f"data {setting.data}, SHA-256 {setting.data_sha256}",
                describe_machine_line(result.machine),
            ],
            verdict="" if setting.max_loss_percent is None else verdict(result),
            verdict_class=_verdict_class(result.within_max_loss),
            scores=Table(("score", "value"), score_rows(result.scores)),
            notes=[_BENEFIT_NOTE],
            figures=[_figure(loss_by_document(result.documents)), _figure(loss_by_position(result.positions))],
            cases_title="Worst cases",
            cases=worst_cases(result.documents),
            documents_title="All documents",
            documents=_document_table(result.documents),
        )
    )


def sweep_page(result: SweepResult) -> str:
    """All tail lengths against the full engine, as HTML text. Worst cases are those of the longest tail within."""
    setting = result.setting
    shown = _shown_row(result)
    documents = () if shown is None else shown.documents
    of_row = "" if shown is None else f", {tail_name(shown)}"
    positions = () if shown is None else shown.positions
    return render(
        Page(
            title=f"pop-eval: tail lengths of {result.full.model}",
            facts=[
                describe_setting(setting, sum(document.num_answer_tokens for document in documents)),
                f"calibrated on {result.calibrate}" if result.calibrate is not None else "not calibrated",
                *_engine_facts(result.full, "full"),
                f"data {setting.data}, SHA-256 {setting.data_sha256}",
                describe_machine_line(result.machine),
            ],
            verdict="" if setting.max_loss_percent is None else sweep_verdict(result),
            verdict_class=_verdict_class(result.longest is not None),
            scores=Table(_SWEEP_HEADER, [_sweep_cells(row) for row in result.rows], result.longest),
            notes=[_BENEFIT_NOTE, *(f"{tail_name(row)}: {row.refused}" for row in result.rows if row.refused)],
            figures=[
                _figure(trade_off(result)),
                _figure(tail_lengths(result)),
                *([_figure(loss_by_position(positions), of_row)] if positions else []),
            ],
            cases_title=f"Worst cases{of_row}",
            cases=worst_cases(documents),
            documents_title=f"All documents{of_row}",
            documents=_document_table(documents),
        )
    )


def _shown_row(result: SweepResult) -> SweepRow | None:
    """The row whose documents are shown: the chosen one, else the last that was measured."""
    if result.longest is not None:
        return result.rows[result.longest]
    return next((row for row in reversed(result.rows) if row.scores is not None), None)


def worst_cases(documents: Sequence[DocumentScore]) -> list[Case]:
    """The documents on which POP loses most, of those where it says something else."""
    ranked = sorted(documents, key=lambda document: document.nll_full - document.nll_pop)
    return [_case(document) for document in ranked if not document.greedy_matches][:NUM_CASES]


def _case(document: DocumentScore) -> Case:
    full, pop = mark_differences(document.answer_full, document.answer_pop)
    prompt = document.prompt
    shown = prompt if len(prompt) <= _PROMPT_CHARACTERS else f"… {prompt[-_PROMPT_CHARACTERS:]}"
    return Case(
        title=f"Line {document.line}",
        numbers=(
            f"NLL {document.nll_full:.3f} in full, {document.nll_pop:.3f} with POP, {document.nll_none:.3f} without "
            f"context; top-1 agreement {document.top1_agreement:.1%}; the first {document.num_equal_tokens} tokens "
            "are equal"
        ),
        prompt=shown,
        full=full,
        pop=pop,
        reference="" if document.reference == document.answer_full else document.reference,
    )


def _sweep_cells(row: SweepRow) -> list[str]:
    scores, name = row.scores, tail_name(row)
    if scores is None:
        return [name, "not built", *[""] * (len(_SWEEP_HEADER) - 2)]
    return [
        name,
        format_benefit(scores.benefit),
        with_error(scores.nll_pop, ".4f"),
        with_error(scores.kl, ".4f"),
        str(scores.top1_agreement),
        str(scores.first_token_agreement),
        str(scores.exact_match),
        with_error(scores.ttft_pop_ms, ".1f"),
        with_error(scores.ttft_ratio, ".3f"),
    ]


def _document_table(documents: Sequence[DocumentScore]) -> Table:
    return Table(
        _DOCUMENT_HEADER,
        [
            [
                str(document.line),
                str(document.num_prompt_tokens),
                str(document.num_answer_tokens),
                *(f"{nll:.4f}" for nll in (document.nll_full, document.nll_pop, document.nll_none, document.kl)),
                f"{document.top1_agreement:.1%}",
                str(document.num_equal_tokens),
                f"{document.ttft_full_ms:.1f}",
                f"{document.ttft_pop_ms:.1f}",
            ]
            for document in documents
        ],
    )


def _engine_facts(engine: EvalEngine, name: str) -> list[str]:
    versions = ", ".join(f"{package} {version}" for package, version in sorted(engine.versions.items()))
    revision = "" if engine.revision is None else f" at {engine.revision}"
    return [
        f"{name} engine {engine.directory}: {engine.model}{revision}, built with pop-engine {engine.built_with}, "
        f"{versions}, peak memory {engine.peak_memory_bytes / 1e6:,.0f} MB"
    ]


def _figure(plot: Plot, of_row: str = "") -> Figure:
    return Figure(draw(plot), plot.title + of_row)


def _verdict_class(is_good: bool | None) -> str:
    return {True: "good", False: "bad", None: ""}[is_good]
