"""`pop-build`: turn a checkpoint into an engine directory."""

import argparse
import sys
from pathlib import Path
from typing import get_args

from pop_engine.builder.checkpoint.locate import locate_model
from pop_engine.builder.graph_process import preload_graph_server
from pop_engine.builder.preset_table import preset_table
from pop_engine.builder.required_packages import require_build_packages
from pop_engine.builder.staging import check_out
from pop_engine.configs.build_config import BuildConfig, BuildOptions, load_options
from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import DType, TargetName, WeightsMode
from pop_engine.configs.plan_options import DEFAULT_RTX_GPU, LAYOUTS, OPTIMIZATION_LEVELS, RTX_GPUS


def main(argv: list[str] | None = None) -> int:
    """Parse the flags, build, print a summary."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    return exit_with_message("pop-build", lambda: _run(arguments), verbose=arguments.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-build",
        description="Turn a checkpoint into an engine directory that prefills with a pruned tail.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--list", action=_ListAction, nargs=0, help="print the presets and exit")
    add("-m", "--model", required=True, help="preset, checkpoint folder, .gguf file or hub id")
    add("-o", "--out", required=True, type=Path, help="engine directory to write")
    add("--target", choices=get_args(TargetName), help="what the engine runs on (default: ort-cpu)")
    add(
        "--dtype",
        choices=get_args(DType),
        help="what weights and cache are kept in (default: fp32 on ort-cpu, else bf16)",
    )
    add("--gpu", choices=RTX_GPUS, help=f"what tensorrt-rtx compiles for (default: {DEFAULT_RTX_GPU})")
    add(
        "--engine-layout",
        choices=LAYOUTS,
        help="two plans that share the weights, one that holds them, or two that do (split)",
    )
    levels = f"{OPTIMIZATION_LEVELS[0]}-{OPTIMIZATION_LEVELS[-1]}"
    add("--optimization-level", type=int, metavar=levels, help="how long tensorrt looks for fast kernels")
    add("--timing-cache", metavar="FILE", help="kernel timings that tensorrt reads and adds to")
    tail = parser.add_mutually_exclusive_group()
    tail.add_argument("--tail-layers", type=int, metavar="N", help="layers that prefill skips (default: a third)")
    tail.add_argument("--prune-ratio", type=float, metavar="R", help="the same as a share of the layers")
    tail.add_argument("--prune-plan", metavar="FILE.json", help="the tail that pop-analyze chose")
    add("--boundary", choices=get_args(Boundary), help="how the last prompt token is run (default: one-pass)")
    add("--boundary-window", type=int, metavar="W", help="prompt tokens that go through the tail in full (default: 1)")
    calibration = parser.add_mutually_exclusive_group()
    calibration.add_argument("--calibration", type=Path, metavar="DIR", help="calibrated tail, by pop-calibrate")
    calibration.add_argument("--calibrate", metavar="FILE|self", help="calibrate the tail on this text, then build")
    add("--max-seq-len", type=int, metavar="N", help="tokens a slot holds (default: 4096, or the model's limit)")
    add("--max-batch-size", type=int, metavar="N", help="slots (default: 8)")
    add("--max-prefill-len", type=int, metavar="N", help="tokens prefilled in one call (default: 512)")
    add("--weights", choices=get_args(WeightsMode), help="how the engine gets its weights (default: link if it can)")
    add("--revision", help="revision of a hub id")
    add("--config", type=Path, metavar="FILE.yaml", help="options from a file; flags override it")
    add("--force", action="store_true", help="replace an engine that stands at --out")
    add("--no-verify", action="store_true", help="skip the check against PyTorch, and say so in the manifest")
    add("--no-weights", action="store_true", help="build the graphs alone, from the model's config")
    add("--trust-remote-code", action="store_true", help="run the model code that a checkpoint brings with it")
    add("--dump-dir", type=Path, metavar="DIR", help="write each graph down after every pass")
    add("--verbose", action="store_true", help="print every step, and tracebacks")
    return parser


class _ListAction(argparse.Action):
    """Ends the command like --help does: nothing else is required then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(exit_with_message(parser.prog, _print_presets))


def _print_presets() -> int:
    print(preset_table(), end="", flush=True)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    require_build_packages()
    config = _config(arguments)
    locate_model(config.model, config.options.revision)
    check_out(config.out, force=config.force)
    preload_graph_server()
    # torch and transformers take seconds to import: not for --help, and not before what was typed is known to be right.
    from pop_engine.builder.pipeline import build
    from pop_engine.builder.progress import BuildProgress
    from pop_engine.builder.quiet import quiet_libraries
    from pop_engine.builder.summary import summarize

    quiet_libraries(verbose=config.verbose)
    with BuildProgress(verbose=config.verbose) as progress:
        manifest = build(config, progress)
    sys.stdout.write(summarize(manifest, config.out))
    return 0


def _config(arguments: argparse.Namespace) -> BuildConfig:
    flags = BuildOptions(
        target=arguments.target,
        dtype=arguments.dtype,
        gpu=arguments.gpu,
        engine_layout=arguments.engine_layout,
        optimization_level=arguments.optimization_level,
        timing_cache=arguments.timing_cache,
        tail_layers=arguments.tail_layers,
        prune_ratio=arguments.prune_ratio,
        prune_plan=arguments.prune_plan,
        boundary=arguments.boundary,
        boundary_window=arguments.boundary_window,
        max_seq_len=arguments.max_seq_len,
        max_batch_size=arguments.max_batch_size,
        max_prefill_len=arguments.max_prefill_len,
        weights=arguments.weights,
        revision=arguments.revision,
    )
    return BuildConfig(
        model=arguments.model,
        out=arguments.out,
        options=flags if arguments.config is None else flags.over(load_options(arguments.config)),
        force=arguments.force,
        verify=not arguments.no_verify,
        with_weights=not arguments.no_weights,
        trust_remote_code=arguments.trust_remote_code,
        dump_dir=arguments.dump_dir,
        verbose=arguments.verbose,
        calibration=arguments.calibration,
        calibrate=arguments.calibrate,
    )


if __name__ == "__main__":
    sys.exit(main())
