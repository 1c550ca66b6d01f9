"""The ablations as a table: for a terminal, and in Markdown for the README."""

from collections.abc import Sequence

from pop_engine.tools.ablations.order import order_steps
from pop_engine.tools.ablations.result import AblationResult, AblationRow
from pop_engine.tools.evaluation.table import describe_machine_line, describe_setting, format_benefit, with_error
from pop_engine.tools.markdown import markdown_table, origin
from pop_engine.tools.table import align_rows

HEADER = ("variant", "layers", "benefit kept", "NLL", "top-1", "first token")


def format_ablations(result: AblationResult) -> str:
    """Everything about one model."""
    lines = [
        *describe_result(result),
        "",
        *align_rows([list(HEADER), *ablation_cells(result)], frozenset({2, 3, 4, 5})),
        *(f"{row.title}: {row.refused}" for row in result.rows if row.refused is not None),
    ]
    if steps := order_steps(result):
        lines += ["", *map(str, steps)]
    return "\n".join(lines)


def describe_result(result: AblationResult) -> list[str]:
    """Model, data and machine, a line each."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    fit = result.fit
    fitted = [] if fit is None else [f"fitted on {fit.num_tokens} tokens of {fit.data}"]
    return [
        f"{result.model}, {result.num_pruned_layers} of {result.num_hidden_layers} layers pruned, fp32, {versions}",
        *fitted,
        describe_setting(result.setting, result.full.num_answer_tokens),
        describe_machine_line(result.machine),
    ]


def ablation_cells(result: AblationResult) -> list[list[str]]:
    """The full model, every ablation, and the model without context, in the cells of HEADER."""
    full, none = result.full.nll, result.full.nll_none
    return [
        ["full model", "", "100.0%", with_error(full, ".3f"), "", ""],
        *(_row_cells(row) for row in result.rows),
        ["full model without context", "", "0.0%", with_error(none, ".3f"), "", ""],
    ]


def _row_cells(row: AblationRow) -> list[str]:
    layers = format_layers(row.layers)
    if row.scores is None:
        return [row.title, layers, "not possible", "", "", ""]
    scores = row.scores
    return [
        row.title,
        layers,
        format_benefit(scores.benefit),
        with_error(scores.nll, ".3f"),
        str(scores.top1_agreement),
        str(scores.first_token_agreement),
    ]


def format_layers(layers: Sequence[int]) -> str:
    """Indices, with runs of three and more as from–to."""
    runs: list[list[int]] = []
    for layer_idx in layers:
        if runs and layer_idx == runs[-1][-1] + 1:
            runs[-1].append(layer_idx)
        else:
            runs.append([layer_idx])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


def render_ablations(results: Sequence[AblationResult]) -> str:
    """One Markdown table over all models, for the README. Models of other ablations share rows."""
    titles = dict.fromkeys(row.title for result in results for row in result.rows)
    rows = [[title, *(_markdown_cell(result, title) for result in results)] for title in titles]
    return (
        "**The paper's ablations and baselines**: share of the context's benefit kept, and in brackets top-1 agreement "
        "with the full model, on documents that nothing was fitted on, ± standard errors. By `pop-eval --ablations "
        f"all`. {origin(*(result.machine for result in results))}\n\n"
        + markdown_table(["", *map(_column, results)], rows)
    )


def _column(result: AblationResult) -> str:
    pruned = f"{result.num_pruned_layers} of {result.num_hidden_layers}"
    scored = f"{result.setting.num_documents} documents, {result.full.num_answer_tokens:,} tokens scored"
    return f"{result.model}, {pruned} ({scored})"


def _markdown_cell(result: AblationResult, title: str) -> str:
    row = next((row for row in result.rows if row.title == title), None)
    if row is None or row.scores is None:
        return "" if row is None else "not possible"
    return f"{format_benefit(row.scores.benefit)} ({row.scores.top1_agreement.value:.1%})"
