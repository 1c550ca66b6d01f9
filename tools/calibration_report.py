"""A calibrated tail in words: what it was fitted on, and what held-out text says of it."""

from pop_engine.configs.calibration import CalibrationRecord, ProjectionError
from pop_engine.tools.table import align_rows


def calibration_lines(record: CalibrationRecord | None) -> list[str]:
    """Nothing where the tail is not calibrated."""
    if record is None:
        return []
    rows = [["layer", "K error", "V error"]]
    rows += [[str(layer.layer_idx), _change(layer.key), _change(layer.value)] for layer in record.layers]
    return [
        f"on {record.num_tokens} tokens of {record.data} (sha256 {record.sha256[:12]})",
        f"held out: {record.num_held_out} pieces, contexts of up to {record.context_len} tokens; "
        f"NLL {record.nll_plain:.4f} plain, {record.nll_calibrated:.4f} calibrated",
        f"context's benefit kept: {record.benefit_plain} plain, {record.benefit_calibrated} calibrated",
        *align_rows(rows, frozenset({0, 1, 2})),
    ]


def _change(error: ProjectionError) -> str:
    return f"{error.plain:.1%} → {error.calibrated:.1%}"
