"""What an evaluation draws: losses of documents and along the answers, and the trade-off over tail lengths."""

from collections.abc import Sequence

from pop_engine.tools.evaluation.result import SweepResult, SweepRow
from pop_engine.tools.evaluation.scores import DocumentScore, PositionLoss, Scores
from pop_engine.tools.evaluation.svg import Plot, Point, Series
from pop_engine.tools.evaluation.table import tail_name


def loss_by_document(documents: Sequence[DocumentScore]) -> Plot:
    """POP's loss over the full model's: on the diagonal nothing is lost. Beside it the loss without context."""
    pop = [_document_point(document, document.nll_pop, "with POP") for document in documents]
    none = [_document_point(document, document.nll_none, "without context") for document in documents]
    return Plot(
        "Loss of each document: on the dashed line nothing is lost",
        "NLL of the full model, nats a token",
        "NLL",
        [
            Series("POP", pop, 0, has_line=False),
            Series("full model without context", none, 2, has_line=False),
        ],
        diagonal=True,
    )


def _document_point(document: DocumentScore, nll: float, kind: str) -> Point:
    return Point(document.nll_full, nll, title=f"line {document.line}: {nll:.3f} {kind}, {document.nll_full:.3f} full")


def loss_by_position(positions: Sequence[PositionLoss]) -> Plot:
    """Mean loss along the answers, which says whether POP errs at their beginning or all along."""
    columns = (("POP", "nll_pop"), ("full model", "nll_full"), ("full model without context", "nll_none"))
    return Plot(
        "Mean loss at each position of the answers",
        "answer token",
        "NLL, nats",
        [
            Series(name, [Point(loss.position + 1, getattr(loss, field)) for loss in positions], style, has_marks=False)
            for style, (name, field) in enumerate(columns)
        ],
    )


def trade_off(result: SweepResult) -> Plot:
    """Benefit kept over the speed of the first token, a point a tail length."""
    limit = result.setting.max_loss_percent
    return Plot(
        "Speed and fidelity: labels are tail layers, bars standard errors over documents",
        "first token, times as fast as the full engine",
        "benefit kept",
        [Series(name, _speed_points(rows), style) for style, (name, rows) in enumerate(_kinds(result))],
        limit=None if limit is None else 1 - limit / 100,
        limit_name="" if limit is None else f"--max-loss {limit:g}",
        y_format=_percent,
    )


def _speed_points(rows: Sequence[tuple[SweepRow, Scores]]) -> list[Point]:
    points = []
    for row, scores in rows:
        if scores.benefit is not None:
            label, title = str(row.num_tail_layers), f"{tail_name(row)}: {scores.benefit} kept"
            benefit = scores.benefit
            points.append(Point(scores.ttft_ratio.value, benefit.value, benefit.standard_error, label, title))
    return points


def tail_lengths(result: SweepResult) -> Plot:
    """Agreement with the full model over the length of the tail."""
    return Plot(
        "Agreement of the most likely token with the full model's",
        "tail layers",
        "top-1 agreement",
        [
            Series(
                name,
                [
                    Point(row.num_tail_layers, scores.top1_agreement.value, scores.top1_agreement.standard_error)
                    for row, scores in rows
                ],
                style,
            )
            for style, (name, rows) in enumerate(_kinds(result))
        ],
        y_format=_percent,
    )


def _kinds(result: SweepResult) -> list[tuple[str, list[tuple[SweepRow, Scores]]]]:
    """The rows that were measured, plain ones and calibrated ones."""
    measured = [(row, row.scores) for row in result.rows if row.scores is not None]
    plain = [pair for pair in measured if not pair[0].calibrated]
    calibrated = [pair for pair in measured if pair[0].calibrated]
    return [("plain POP", plain), *([("calibrated", calibrated)] if calibrated else [])]


def _percent(value: float) -> str:
    return f"{value:.0%}"
