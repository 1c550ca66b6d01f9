"""The calibration table, as Markdown: tails down, lengths of context across."""

from pop_engine.configs.calibration import Estimate
from pop_engine.tools.calibration_table import CalibrationTable
from pop_engine.tools.markdown import markdown_table, origin


def render_calibration(table: CalibrationTable) -> str:
    """One model's table, with what it was measured on."""
    lengths = table.setting.context_lens
    header = [f"{what}, {length:,}" for length in lengths for what in ("benefit kept", "first choice kept")]
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in table.rows:
        cells = rows.setdefault((str(row.num_tail_layers), row.variant, str(row.boundary_window)), [])
        cells += [_share(row.benefit), _share(row.agreement)]
    lines = [[*variant, *cells] for variant, cells in rows.items()]
    return f"{_caption(table)}\n\n{markdown_table(['tail layers', 'prefill', 'boundary window', *header], lines)}"


def _caption(table: CalibrationTable) -> str:
    setting, without = table.setting, table.nll_without_context
    losses = ", ".join(f"{without[length]:.3f} and {nll:.3f} at {length:,}" for length, nll in table.nll_full.items())
    runs = ", ".join(
        f"{run.num_tokens:,} tokens in {run.seconds:.0f} s and {run.peak_memory_bytes / 1e6:,.0f} MB ({length} layers)"
        for length, run in table.runs.items()
    )
    fitted = "its own text" if setting.fitted_on == "self" else "other documents"
    return (
        f"**What the answers lose, and what calibration gives back**: {setting.model}, {setting.num_documents} "
        f"held-out documents, the continuation scored by the full model. Loss in nats a token without context and with "
        f"it: {losses}; the benefit kept is the share of that gap. `pop-calibrate`, on {fitted}: {runs}, of which "
        f"{table.weight_bytes / 1e6:,.0f} MB are weights. By `tools/calibration_table.py`, text from "
        f"`tools/local_text.py`. {origin(table.machine)}"
    )


def _share(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)
