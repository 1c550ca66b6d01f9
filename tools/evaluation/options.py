"""What a user asks of pop-eval, checked before minutes are spent on it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import MANIFEST_NAME
from pop_engine.tools.ablations.catalogue import NAMES, Ablation, find_ablations
from pop_engine.tools.command_line import check_writable, parse_count


@dataclass(frozen=True)
class SweepOptions:
    """Which tails to build, and how. `calibrate` is a text file or `self`; `work_dir` keeps what was built."""

    tail_layers: tuple[int, ...]
    calibrate: str | None
    calibrate_tokens: int | None
    boundary_window: int | None
    max_seq_len: int | None
    work_dir: Path | None


@dataclass(frozen=True)
class AblationOptions:
    """Which ablations, of how many layers. `calibrate` is a text file or `self`; `work_dir` keeps what was measured."""

    ablations: tuple[Ablation, ...]
    tail_layers: int | None
    calibrate: str | None
    calibrate_tokens: int | None
    work_dir: Path | None


@dataclass(frozen=True)
class EvalOptions:
    """The command line. `subject` is an engine directory, or with `sweep` or `ablations` a model.

    `max_loss` is in percent.
    """

    subject: str
    against: str | None
    data: Path
    context_len: int | None
    max_tokens: int
    limit: int | None
    chat: bool
    max_loss: float | None
    threads: int | None
    json_file: Path | None
    html_file: Path | None
    sweep: SweepOptions | None
    ablations: AblationOptions | None


def parse_options(argv: Sequence[str] | None) -> EvalOptions:
    """Read the command line. Raises UsageError for what cannot be meant."""
    found = _parser().parse_args(argv)
    options = EvalOptions(
        subject=found.subject,
        against=found.against,
        data=found.data,
        context_len=found.context_len,
        max_tokens=found.max_tokens,
        limit=found.limit,
        chat=not found.no_chat,
        max_loss=found.max_loss,
        threads=found.threads,
        json_file=found.json,
        html_file=found.html,
        sweep=_sweep(found),
        ablations=_ablations(found),
    )
    _check(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-eval",
        description="What POP does to the answers on your own prompts, and how much sooner they begin.",
        epilog='Lines of FILE.jsonl: {"prompt": "…", "answer": "…"}, {"prompt": "…"} or {"text": "…"}.',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("subject", metavar="ENGINE|MODEL", help="engine directory; with --sweep or --ablations a model")
    add("--against", metavar="FULL_ENGINE|MODEL", help="built with --tail-layers 0, or the model to build it from")
    add("--data", required=True, type=Path, metavar="FILE.jsonl", help="prompts, with or without answers, or texts")
    add("--context-len", type=parse_count, metavar="N", help="tokens kept of a prompt (the last) or a text (the first)")
    add(
        "--max-tokens",
        type=parse_count,
        default=64,
        metavar="N",
        help="answer tokens scored and generated (default: 64)",
    )
    add("--limit", type=parse_count, metavar="N", help="only the first N lines")
    add("--no-chat", action="store_true", help="prompts as they are, without the chat template")
    add("--max-loss", type=float, metavar="PCT", help="exit with 1 where POP loses more of the context's benefit")
    add("--threads", type=parse_count, metavar="N", help="threads (default: the cores this process may use)")
    add("--json", type=Path, metavar="FILE", help="write everything to this file")
    add("--html", type=Path, metavar="FILE", help="write a report with plots and the worst cases, in one file")
    sweep = parser.add_argument_group("sweep over tail lengths")
    sweep.add_argument("--sweep", type=_tails, metavar="N,N", help="build and measure these tails of MODEL")
    sweep.add_argument(
        "--boundary-window", type=parse_count, metavar="W", help="prompt tokens that go through the tail"
    )
    sweep.add_argument("--max-seq-len", type=parse_count, metavar="N", help="tokens a slot holds")
    ablations = parser.add_argument_group("the paper's ablations and baselines, in PyTorch")
    ablations.add_argument(
        "--ablations", type=_names, metavar="all|NAME,NAME", help=f"measure these of MODEL: {', '.join(NAMES)}"
    )
    ablations.add_argument(
        "--tail-layers", type=parse_count, metavar="N", help="layers that are pruned (default: a third)"
    )
    both = parser.add_argument_group("sweep or ablations")
    both.add_argument("--calibrate", metavar="FILE|self", help="text that calibration and baselines are fitted on")
    both.add_argument("--calibrate-tokens", type=parse_count, metavar="N", help="tokens to fit on (default: 33000)")
    both.add_argument("--work-dir", type=Path, metavar="DIR", help="keep what is made here, and use what is there")
    return parser


def _tails(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers between commas, like 0,3,6,10")
    return tuple(sorted({int(part) for part in parts}))


def _names(text: str) -> tuple[Ablation, ...]:
    try:
        return find_ablations(tuple(part.strip() for part in text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _sweep(found: argparse.Namespace) -> SweepOptions | None:
    if found.sweep is None:
        _refuse_flags(found, ("boundary_window", "max_seq_len"), "--sweep")
        if found.ablations is None:
            _refuse_flags(found, ("calibrate", "calibrate_tokens", "work_dir"), "--sweep or --ablations")
        return None
    flags = ("calibrate", "calibrate_tokens", "boundary_window", "max_seq_len", "work_dir")
    return SweepOptions(found.sweep, *(getattr(found, name) for name in flags))


def _ablations(found: argparse.Namespace) -> AblationOptions | None:
    if found.ablations is None:
        _refuse_flags(found, ("tail_layers",), "--ablations")
        return None
    if found.sweep is not None:
        raise UsageError("--ablations: cannot be combined with --sweep; run one after the other")
    for name in ("against", "max_loss"):
        if getattr(found, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: not used with --ablations; leave it out")
    flags = ("tail_layers", "calibrate", "calibrate_tokens", "work_dir")
    return AblationOptions(found.ablations, *(getattr(found, name) for name in flags))


def _refuse_flags(found: argparse.Namespace, names: Sequence[str], owner: str) -> None:
    for name in names:
        if getattr(found, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: only used with {owner}; leave it out, or add {owner}")


def _check(options: EvalOptions) -> None:
    is_engine = (Path(options.subject) / MANIFEST_NAME).is_file()
    if options.sweep is None and options.ablations is None and options.against is None:
        raise UsageError("--against: missing; give the full engine (--tail-layers 0), or the model to build it from")
    if options.sweep is not None:
        if is_engine:
            raise UsageError(f"{options.subject}: is an engine; --sweep builds engines itself, so give it the model")
        _check_calibrate(options.sweep, options.data)
    if options.ablations is not None:
        if is_engine:
            raise UsageError(f"{options.subject}: is an engine; --ablations change the model itself, so give it that")
        _check_calibrate(options.ablations, options.data)
        _check_text(options.ablations)
    if options.max_loss is not None and not 0 <= options.max_loss <= 100:
        raise UsageError(f"--max-loss {options.max_loss:g}: expected a percentage from 0 to 100")
    check_writable("--json", options.json_file)
    check_writable("--html", options.html_file)


def _check_text(asked: AblationOptions) -> None:
    fitted = [ablation.name for ablation in asked.ablations if ablation.needs_text]
    if fitted and asked.calibrate is None:
        raise UsageError(
            f"--ablations {','.join(fitted)}: fitted on text; give --calibrate FILE|self, or other ablations"
        )


def _check_calibrate(asked: SweepOptions | AblationOptions, data: Path) -> None:
    if asked.calibrate is None:
        if asked.calibrate_tokens is not None:
            raise UsageError("--calibrate-tokens: only used with --calibrate; leave it out, or add --calibrate")
        return
    if asked.calibrate == "self":
        return
    path = Path(asked.calibrate)
    if not path.is_file():
        raise UsageError(f"--calibrate {path}: no such file; give a .txt or .jsonl, or self")
    if data.is_file() and path.samefile(data):
        raise UsageError(f"--calibrate {path}: is the text to be scored, which would flatter it; give other text")
