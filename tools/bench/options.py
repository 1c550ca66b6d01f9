"""What a user asks of pop-bench."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.tools.bound import MachineRates
from pop_engine.tools.command_line import check_writable, parse_count, parse_counts

DEFAULT_INPUT_LENS = (32, 128, 512, 2048)


@dataclass(frozen=True)
class PeerOptions:
    """Which other engines take part (all where `names` is empty), and where what is made for them stays."""

    names: tuple[str, ...]
    gguf: Path | None
    work_dir: Path | None


@dataclass(frozen=True)
class BenchOptions:
    """The command line. `input_lens` None means those of the default that fit the engine."""

    engine: Path
    against: Path | None
    input_lens: tuple[int, ...] | None
    output_len: int
    batch_sizes: tuple[int, ...]
    concurrency: tuple[int, ...]
    num_requests: int | None
    repeats: int
    seed: int
    threads: int
    rates: MachineRates | None
    measure_rates: bool
    peers: PeerOptions | None
    json_file: Path | None
    append: bool
    plot: Path | None


def parse_options(argv: Sequence[str] | None) -> BenchOptions:
    """Read the command line. Raises UsageError for what cannot be meant."""
    found = _parser().parse_args(argv)
    options = BenchOptions(
        engine=found.engine,
        against=found.against,
        input_lens=found.input_len,
        output_len=found.output_len,
        batch_sizes=found.batch_size,
        concurrency=found.concurrency,
        num_requests=found.num_requests,
        repeats=found.repeats,
        seed=found.seed,
        # Spelled out, so that every engine has as many.
        threads=found.threads or len(os.sched_getaffinity(0)),
        rates=_rates(found.gflops, found.gbytes),
        measure_rates=found.measure_rates,
        peers=_peers(found),
        json_file=found.json,
        append=found.append,
        plot=found.plot,
    )
    _check(options)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-bench",
        description="Time an engine: first token, tokens after it, throughput, memory; against others, in turns.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("engine", metavar="ENGINE", type=Path)
    add("--against", metavar="FULL_ENGINE", type=Path, help="built with --tail-layers 0; the ratio to it, the bound")
    lens = ",".join(map(str, DEFAULT_INPUT_LENS))
    add("--input-len", type=parse_counts, metavar="N,N", help=f"prompt tokens (default: of {lens} those that fit)")
    add("--output-len", type=parse_count, default=64, metavar="N", help="generated tokens (default: 64)")
    add("--batch-size", type=parse_counts, default=(1,), metavar="N,N", help="sequences at once (default: 1)")
    add("--concurrency", type=parse_counts, default=(), metavar="N,N", help="requests in flight, batched continuously")
    add("--num-requests", type=parse_count, metavar="N", help="requests of a load (default: 4 for each in flight)")
    add("--repeats", type=parse_count, default=7, metavar="N", help="rounds, after one that warms up (default: 7)")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts, which are random tokens")
    add("--threads", type=parse_count, metavar="N", help="of every engine (default: the cores this process may use)")
    add("--gflops", type=float, metavar="X", help="measured GFLOP/s of a large product, for the bounds")
    add("--gbytes", type=float, metavar="X", help="measured GB/s read from memory, for the bounds")
    add("--measure-rates", action="store_true", help="measure both first: a second of all threads")
    add("--json", type=Path, metavar="FILE", help="write everything to this file")
    add("--append", action="store_true", help="keep the runs that FILE has, and add this one")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the times to the first token")
    peers = parser.add_argument_group("other engines on the same checkpoint, those that are installed")
    peers.add_argument("--peers", action="store_true", help="all of them; --list-peers names them")
    peers.add_argument("--peer", action="append", default=[], metavar="NAME", help="this one; may be given again")
    peers.add_argument("--list-peers", action=_ListPeers, help="say which there are and which are installed")
    peers.add_argument("--gguf", type=Path, metavar="FILE", help="the checkpoint for llama.cpp, if ENGINE is of none")
    peers.add_argument("--work-dir", type=Path, metavar="DIR", help="keep what is made for peers here, and use it")
    return parser


class _ListPeers(argparse.Action):
    """Like --help: print and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pop_engine.tools.bench.peers.registry import list_peers

        print("\n".join(list_peers()))
        parser.exit()


def _rates(gflops: float | None, gbytes: float | None) -> MachineRates | None:
    if (gflops is None) != (gbytes is None):
        raise UsageError("--gflops and --gbytes: the roofline bound needs both")
    if gflops is None or gbytes is None:
        return None
    if min(gflops, gbytes) <= 0:
        raise UsageError(f"--gflops {gflops:g} and --gbytes {gbytes:g}: expected measured rates above 0")
    return MachineRates(gflops * 1e9, gbytes * 1e9)


def _peers(found: argparse.Namespace) -> PeerOptions | None:
    if not found.peers and not found.peer:
        for flag, value in (("--gguf", found.gguf), ("--work-dir", found.work_dir)):
            if value is not None:
                raise UsageError(f"{flag} {value}: only used by peers; leave it out, or add --peers")
        return None
    if found.gguf is not None and not found.gguf.is_file():
        raise UsageError(f"--gguf {found.gguf}: no such file")
    from pop_engine.tools.bench.peers.registry import check_names

    check_names(found.peer)
    # --peers asks for all, whatever else is named.
    return PeerOptions(() if found.peers else tuple(found.peer), found.gguf, found.work_dir)


def _check(options: BenchOptions) -> None:
    if options.num_requests is not None and not options.concurrency:
        raise UsageError(f"--num-requests {options.num_requests}: only used with --concurrency; leave it out")
    if options.measure_rates and options.rates is not None:
        raise UsageError("--measure-rates: --gflops and --gbytes give the rates already; leave one of them out")
    if options.append and options.json_file is None:
        raise UsageError("--append: only used with --json FILE; leave it out, or name the file")
    if options.plot is not None and options.plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot {options.plot}: expected a file that ends in .svg, the one form that is drawn")
    check_writable("--json", options.json_file)
    check_writable("--plot", options.plot)
