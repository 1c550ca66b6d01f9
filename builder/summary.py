"""What pop-build prints when it is done."""

from pathlib import Path

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
            f"{manifest.boundary} boundary",
        ),
        ("limits", f"{limits.max_seq_len} tokens, {limits.max_batch_size} slots"),
        ("weights", _describe_weights(manifest.weights)),
        ("graphs", f"{manifest.prefill.file} and {manifest.decode.file}, which hold no weights"),
        ("verified", _describe_verification(manifest)),
        ("steps", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in build.step_seconds.items())),
        ("memory", f"{build.peak_memory_bytes / _MEGABYTE:,.0f} MB at the peak, all processes"),
    ]
    return "".join(f"{name:<9} {text}\n" for name, text in rows)


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
    )
