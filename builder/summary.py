"""What pop-build prints when it is done."""

from pathlib import Path

from pop_engine.configs.calibration import CalibrationRecord
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.manifest import Manifest, WeightsRecord

_MEGABYTE = 1e6


def summarize(manifest: Manifest, out: Path) -> str:
    """A few aligned lines: what was built, what it shares, how it was checked, what it took."""
    plan, limits = manifest.plan, manifest.limits
    build = manifest.build
    rows = [
        ("engine", f"{out}  ({manifest.source.name}, {manifest.target.name}, {manifest.dtype})"),
        (
            "layers",
            f"{plan.num_trunk_layers} trunk + {plan.num_tail_layers} tail of {plan.num_hidden_layers}, "
            f"{manifest.boundary} boundary"
            + (f" of {window} tokens" if (window := manifest.boundary_window) > 1 else ""),
        ),
        *_calibration_rows(manifest.calibration),
        ("limits", f"{limits.max_seq_len} tokens, {limits.max_batch_size} slots"),
        ("weights", _describe_weights(manifest.weights)),
        ("graphs", f"{_listed([graph.file for graph in _graphs(manifest)])}, which hold no weights"),
        *_plan_rows(manifest),
        ("verified", _describe_verification(manifest)),
        ("steps", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.step_seconds.items())),
        ("memory", f"{build.peak_memory_bytes / _MEGABYTE:,.0f} MB at the peak, all processes"),
    ]
    return "".join(f"{name:<9} {text}\n" for name, text in rows)


def _graphs(manifest: Manifest) -> list[GraphRecord]:
    return [manifest.prefill, manifest.decode, *([manifest.vision.graph] if manifest.vision else [])]


def _listed(names: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _calibration_rows(record: CalibrationRecord | None) -> list[tuple[str, str]]:
    if record is None:
        return []
    kept = f"held-out benefit kept {record.benefit_plain} plain, {record.benefit_calibrated} calibrated"
    return [("tail", f"calibrated on {record.num_tokens} tokens of {record.data}; {kept}")]


def _plan_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Size of the plans, and what that is of the weights: it tells whether they hold them."""
    plans = [record.plan for record in _graphs(manifest) if record.plan is not None]
    if not plans:
        return []
    size = sum(plan.num_bytes for plan in plans)
    share = f", {size / manifest.weights.num_bytes:.1%} of the weights" if manifest.weights else ""
    constants = sum(constant.num_bytes for plan in plans for constant in plan.constants)
    text = (
        f"{_listed([plan.file for plan in plans])} for {plans[0].gpu}, {size / _MEGABYTE:,.1f} MB{share}; "
        f"{constants:,} bytes of constants inside"
    )
    return [("plans", text), ("compiled", ", ".join(f"{plan.file} in {plan.compile_seconds:.1f} s" for plan in plans))]


def _describe_weights(weights: WeightsRecord | None) -> str:
    if weights is None:
        return "none: this engine cannot run (--no-weights)"
    how = {"link": "hard-linked", "copy": "written once", "reference": f"referenced in {weights.directory}"}
    files = "file" if len(weights.files) == 1 else "files"
    size = weights.num_bytes / _MEGABYTE
    return f"{size:,.0f} MB in {len(weights.files)} {files}, {how[weights.mode]}, one copy for both graphs"


def _describe_verification(manifest: Manifest) -> str:
    record = manifest.verification
    if record.status == "skipped":
        return f"no ({record.reason})"
    return (
        f"yes: {record.num_prompt_tokens} prompt tokens and {record.num_decode_steps} decode steps against PyTorch, "
        f"largest logit error {max(record.prefill_max_error, record.decode_max_error):.1e}"
        + (f"; an image of {record.num_image_tokens} tokens too" if record.num_image_tokens else "")
    )
