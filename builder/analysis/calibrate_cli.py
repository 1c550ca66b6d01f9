"""`pop-calibrate`: fit a model's tail to its own K and V, for pop-build to use."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pop_engine.builder.checkpoint.locate import locate_model
from pop_engine.builder.required_packages import require_build_packages
from pop_engine.configs.build_config import BuildConfig, BuildOptions, resolve_build
from pop_engine.configs.calibration import CALIBRATION_NAME
from pop_engine.configs.errors import UsageError, exit_with_message

if TYPE_CHECKING:
    from pop_engine.builder.analysis.calibration import Calibration


def main(argv: list[str] | None = None) -> int:
    """Parse the flags, calibrate, print what it gained."""
    arguments = _parser().parse_args(argv)
    return exit_with_message("pop-calibrate", lambda: _run(arguments), verbose=arguments.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-calibrate",
        description="Fit a pruned tail's K and V projections to the full model's, for `pop-build --calibration`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--model", required=True, help="preset, checkpoint folder, .gguf file or hub id")
    add("-o", "--out", required=True, type=Path, help="folder to write")
    add("--data", required=True, metavar="FILE|self", help=".txt, .jsonl, or `self`: text sampled from the model")
    tail = parser.add_mutually_exclusive_group()
    tail.add_argument("--tail-layers", type=int, metavar="N", help="layers that prefill skips (default: a third)")
    tail.add_argument("--prune-ratio", type=float, metavar="R", help="the same as a share of the layers")
    tail.add_argument("--prune-plan", metavar="FILE.json", help="the tail that pop-analyze chose")
    add("--num-tokens", type=int, default=33_000, metavar="N", help="tokens to fit on (default: 33000)")
    add("--context-len", type=int, default=512, metavar="N", help="tokens of a context (default: 512)")
    add("--max-len", type=int, metavar="N", help="tokens of a document that are read (default: all)")
    add("--num-held-out", type=int, default=20, metavar="N", help="pieces of text to check on (default: 20)")
    add("--seed", type=int, default=0, metavar="N", help="of the text that `self` samples")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="what the model runs in (default: fp32)")
    add("--revision", help="revision of a hub id")
    add("--trust-remote-code", action="store_true", help="run the model code that a checkpoint brings with it")
    add("--force", action="store_true", help="replace a calibration that stands at --out")
    add("--verbose", action="store_true", help="print every step, and tracebacks")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    require_build_packages()
    config = _config(arguments)
    locate_model(config.model, config.options.revision)
    _check_out(arguments.out, force=arguments.force)
    # torch and transformers take seconds to import: not for --help, and not before what was typed is known to be right.
    from pop_engine.builder.analysis.calibrate import CalibrationOptions, calibrate
    from pop_engine.builder.checkpoint.source import open_checkpoint
    from pop_engine.builder.export.model import model_dims
    from pop_engine.builder.progress import BuildProgress
    from pop_engine.builder.quiet import quiet_libraries

    quiet_libraries(verbose=arguments.verbose)
    names = ("data", "num_tokens", "context_len", "max_len", "num_held_out", "seed", "dtype")
    options = CalibrationOptions(**{name: getattr(arguments, name) for name in names})
    with BuildProgress(verbose=arguments.verbose) as progress:
        checkpoint = open_checkpoint(config)
        resolved = resolve_build(config.options.over(checkpoint.options), model_dims(checkpoint.hf_config))
        calibration = calibrate(checkpoint, resolved.plan, options, progress)
    calibration.save(arguments.out)
    sys.stdout.write(_summary(calibration, arguments.out))
    return 0


def _config(arguments: argparse.Namespace) -> BuildConfig:
    options = BuildOptions(
        tail_layers=arguments.tail_layers,
        prune_ratio=arguments.prune_ratio,
        prune_plan=arguments.prune_plan,
        revision=arguments.revision,
    )
    return BuildConfig(arguments.model, arguments.out, options, trust_remote_code=arguments.trust_remote_code)


def _check_out(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; choose another folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (out / CALIBRATION_NAME).is_file():
        raise UsageError(f"--out {out}: is in use and holds no calibration; choose an empty or a new folder")
    if not force:
        raise UsageError(f"--out {out}: holds a calibration already; add --force to replace it")


def _summary(calibration: "Calibration", out: Path) -> str:
    record, model = calibration.record, calibration.model
    first, last = record.layers[0], record.layers[-1]
    rows = [
        ("written", f"{out}  ({model.name}, {model.plan.num_tail_layers} tail layers)"),
        ("fitted", f"{record.num_tokens} tokens of {record.data}"),
        ("held out", f"{record.num_held_out} pieces, contexts of up to {record.context_len} tokens"),
        ("benefit", f"{record.benefit_plain} plain, {record.benefit_calibrated} calibrated"),
        ("NLL", f"{record.nll_plain:.4f} plain, {record.nll_calibrated:.4f} calibrated"),
    ]
    for layer in (first, last):
        errors = f"K {layer.key.plain:.1%} → {layer.key.calibrated:.1%}, V {layer.value.plain:.1%} → "
        rows.append((f"layer {layer.layer_idx}", f"error {errors}{layer.value.calibrated:.1%} of the variance"))
    return "".join(f"{name:<9} {text}\n" for name, text in rows)


if __name__ == "__main__":
    sys.exit(main())
