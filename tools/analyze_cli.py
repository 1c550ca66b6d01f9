"""`pop-analyze`: how much each layer matters at prefill and at decode, and a plan of which to prune."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pop_engine.builder.checkpoint.locate import locate_model
from pop_engine.builder.required_packages import require_build_packages
from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.errors import UsageError, exit_with_message

if TYPE_CHECKING:
    from pop_engine.builder.analysis.policy import Policy
    from pop_engine.configs.prune_plan_file import ImportanceRecord, PrunePlanFile


def main(argv: list[str] | None = None) -> int:
    """Parse the flags, analyze, write plan and plot, print the curves."""
    arguments = _parser().parse_args(argv)
    return exit_with_message("pop-analyze", lambda: _run(arguments), verbose=arguments.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-analyze",
        description="Measure how much each layer matters at prefill and at decode, for `pop-build --prune-plan`. "
        "A run that was stopped goes on where it was when it is called again with the same options.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-m", "--model", required=True, help="preset, checkpoint folder, .gguf file or hub id")
    add("-o", "--out", required=True, type=Path, metavar="PLAN.json", help="prune plan to write, with both curves")
    add("--data", default="self", metavar="FILE|self", help=".txt, .jsonl, or `self`: the model's own text (default)")
    add("--num-samples", type=int, default=200, metavar="N", help="prompts (default: 200)")
    add("--max-len", type=int, default=512, metavar="N", help="tokens of a prompt and its output (default: 512)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens sampled as output (default: 64)")
    add(
        "--policy",
        nargs="+",
        default=["last-third"],
        metavar="POLICY",
        help="which tail to prune: last-third (default), knee, `ratio R`, or `budget NLL` in nats an output token",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="draw both curves")
    add("--seed", type=int, default=0, metavar="N", help="of the outputs that are sampled (default: 0)")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="what the model runs in (default: fp32)")
    add("--revision", help="revision of a hub id")
    add("--trust-remote-code", action="store_true", help="run the model code that a checkpoint brings with it")
    add("--force", action="store_true", help="replace the files that stand at --out and --plot")
    add("--verbose", action="store_true", help="print every step, and tracebacks")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    require_build_packages()
    locate_model(arguments.model, arguments.revision)
    _check_files(arguments.out, arguments.plot, force=arguments.force)
    # torch and transformers take seconds to import: not for --help, and not before what was typed is known to be right.
    from pop_engine.builder.analysis.policy import parse_policy
    from pop_engine.builder.quiet import quiet_libraries

    quiet_libraries(verbose=arguments.verbose)
    policy = parse_policy(arguments.policy)
    journal = arguments.out.with_name(f".{arguments.out.name}.samples")
    record = _analyze(arguments, journal)
    plan = _plan(record, policy)
    plan.save(arguments.out)
    if arguments.plot is not None:
        from pop_engine.tools.importance_plot import importance_svg

        arguments.plot.parent.mkdir(parents=True, exist_ok=True)
        arguments.plot.write_text(importance_svg(record), encoding="utf-8")
    # Only now: until both are written, a run that fails has nothing to do again.
    journal.unlink()
    sys.stdout.write(_summary(plan, record, arguments.out))
    return 0


def _check_files(out: Path, plot: Path | None, *, force: bool) -> None:
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot {plot}: expected a file that ends in .svg, the one form that is drawn")
    for flag, path in (("--out", out), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir():
            raise UsageError(f"{flag} {path}: is a folder; give a file in it")
        if path.exists() and not force:
            raise UsageError(f"{flag} {path}: exists already; add --force to replace it")


def _analyze(arguments: argparse.Namespace, journal: Path) -> "ImportanceRecord":
    from pop_engine.builder.analysis.analyze import AnalysisOptions, analyze
    from pop_engine.builder.checkpoint.source import open_checkpoint
    from pop_engine.builder.progress import BuildProgress

    options = AnalysisOptions(
        data=arguments.data,
        num_samples=arguments.num_samples,
        max_len=arguments.max_len,
        output_len=arguments.output_len,
        seed=arguments.seed,
        dtype=arguments.dtype,
    )
    config = BuildConfig(
        arguments.model,
        arguments.out,
        BuildOptions(revision=arguments.revision),
        trust_remote_code=arguments.trust_remote_code,
    )
    with BuildProgress(verbose=arguments.verbose) as progress:
        return analyze(open_checkpoint(config), options, journal, progress)


def _plan(record: "ImportanceRecord", policy: "Policy") -> "PrunePlanFile":
    from pop_engine.configs.prune_plan_file import PrunePlanFile

    chosen = policy.choose(record)
    return PrunePlanFile(chosen.num_hidden_layers, tuple(chosen.tail), str(policy), record)


def _summary(plan: "PrunePlanFile", record: "ImportanceRecord", out: Path) -> str:
    loss = record.tail_loss[len(plan.pruned_layers)]
    lines = [
        f"written   {out}  ({record.model}, {record.num_samples} samples of {record.data})",
        f"plan      {len(plan.pruned_layers)} of {plan.num_hidden_layers} layers pruned at prefill, by {plan.policy}",
        f"predicted {loss.value:.4g} ± {loss.standard_error:.2g} nats an output token, to second order",
        "layer     prefill                 decode",
    ]
    for layer_idx, (prefill, decode) in enumerate(zip(record.prefill, record.decode, strict=True)):
        columns = [f"{found.value:.4g} ± {found.standard_error:.2g}" for found in (prefill, decode)]
        mark = "  pruned" if layer_idx in plan.pruned_layers else ""
        lines.append(f"{layer_idx:<9} {columns[0]:<23} {columns[1]:<23}{mark}".rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
