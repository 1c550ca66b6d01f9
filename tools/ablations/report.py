"""The ablations of one model on a page: the table, a chart of it, and every document's loss."""

from pop_engine.tools.ablations.order import order_steps
from pop_engine.tools.ablations.result import AblationResult
from pop_engine.tools.ablations.table import HEADER, ablation_cells, describe_result
from pop_engine.tools.evaluation.bars import Bar, BarChart, draw_bars
from pop_engine.tools.evaluation.page import Figure, Page, Table, render

# Some baselines lose many times what the context is worth: the bars of the others would vanish.
_LOWEST = -0.5
_KINDS = ("pruned at prefill", "pruned at prefill and decode")
_NOTE = (
    "Benefit kept: the share of (NLL without context − NLL of the full model) that a variant keeps; below 0 the answer "
    "is less likely than without any context. NLL is in nats a token of the answer. Top-1 and first token: how often "
    "the most likely token is the full model's."
)


def ablation_page(result: AblationResult) -> str:
    """All of it as HTML text."""
    steps = order_steps(result)
    is_kept = all(step.is_kept for step in steps)
    order = "The paper's order holds." if is_kept else "The paper's order does not hold everywhere."
    return render(
        Page(
            title=f"pop-eval: ablations of {result.model}",
            facts=[*describe_result(result), f"data {result.setting.data}, SHA-256 {result.setting.data_sha256}"],
            verdict=order if steps else "",
            verdict_class="good" if is_kept else "bad",
            scores=Table(HEADER, ablation_cells(result)),
            notes=[
                _NOTE,
                *(f"{row.title}: {row.refused}" for row in result.rows if row.refused is not None),
                *map(str, steps),
            ],
            figures=[Figure(draw_bars(ablation_chart(result)), "Benefit kept, with standard errors over documents")],
            cases_title="",
            cases=[],
            documents_title="NLL of every document",
            documents=_documents(result),
        )
    )


def ablation_chart(result: AblationResult) -> BarChart:
    """A bar for each ablation with a benefit, in the order of the table."""
    bars = [
        Bar(
            row.title,
            row.scores.benefit.value,
            row.scores.benefit.standard_error,
            0 if row.is_pop else 1,
            str(row.scores.benefit),
        )
        for row in result.rows
        if row.scores is not None and row.scores.benefit is not None
    ]
    low = max(min([0.0, *(bar.value - bar.error for bar in bars)]), _LOWEST)
    return BarChart(
        title=f"Ablations of {result.model}, {result.num_pruned_layers} of {result.num_hidden_layers} layers",
        x_title="share of the context's benefit that is kept",
        bars=bars,
        low=low,
        high=1.0,
        kinds=_KINDS,
        x_format=lambda value: f"{value:.0%}",
    )


def _documents(result: AblationResult) -> Table:
    columns = [(row.title, row.scores.nlls) for row in result.rows if row.scores is not None]
    full = result.full
    rows = [
        [str(line), *(f"{nlls[index]:.4f}" for nlls in (full.nlls, full.nlls_none, *(nlls for _, nlls in columns)))]
        for index, line in enumerate(full.lines)
    ]
    return Table(("line", "full model", "without context", *(title for title, _ in columns)), rows)
