"""`pop-run`: a prompt goes in, the answer streams out."""

import argparse
import sys
import time
from pathlib import Path

from pop_engine.configs.errors import exit_with_message


def main(argv: list[str] | None = None) -> int:
    """Parse the flags and run the prompt, or the batch."""
    arguments = _parser().parse_args(argv)
    return exit_with_message("pop-run", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pop-run",
        description="Complete a prompt with an engine directory; the text streams to stdout.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="engine directory, as pop-build wrote it")
    add("prompt", nargs="?", metavar="PROMPT.txt|-", help="file with the prompt, or - for stdin")
    add("--system", metavar="TEXT", help="system message of the conversation")
    add("--image", action="append", default=[], metavar="FILE", help="image before the prompt; may be repeated")
    add("--video", action="append", default=[], metavar="FILE|DIR", help="video or folder of frames, likewise")
    add("--frame-rate", type=float, metavar="R", help="frames a second of a --video DIR (default: 24)")
    add("--no-chat", action="store_true", help="complete the text as it is, without the chat template")
    add("--max-tokens", type=int, metavar="N", help="tokens to generate at most (default: as many as the slot holds)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest tokens of this total")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (0: all)")
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below this share of the likeliest one's")
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: tokens seen before get less likely"
    )
    add("--seed", type=int, metavar="N", help="the same seed samples the same text")
    add("--stop", action="append", default=[], metavar="S", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", help="go on after an end token")
    add("--logprobs", type=int, metavar="N", help="report log-probabilities, and N alternatives (with --json)")
    add("--threads", type=int, metavar="N", help="threads (default: the cores this process may use)")
    add("--json", action="store_true", help="print the result as JSON instead of streaming text")
    add("--stats", action="store_true", help="print what it cost to stderr (the default on a terminal)")
    add("--batch", type=Path, metavar="FILE.jsonl", help="run many prompts, one JSON object a line, over the slots")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # The engine takes ONNX Runtime with it: not for --help.
    from pop_engine.configs.errors import UsageError
    from pop_engine.runtime.batch_file import read_batch
    from pop_engine.runtime.engine import Engine
    from pop_engine.runtime.images.video import DEFAULT_FRAME_RATE, Video
    from pop_engine.runtime.output import print_batch, print_generation
    from pop_engine.runtime.requests import Request, read_prompt, sampling_params

    if (arguments.prompt is None) == (arguments.batch is None):
        raise UsageError("give either a prompt (PROMPT.txt or -) or --batch FILE.jsonl")
    if (arguments.image or arguments.video) and arguments.batch is not None:
        raise UsageError('--image, --video: not with --batch; write "images" into its lines')
    if arguments.logprobs is not None and not arguments.json and arguments.batch is None:
        raise UsageError("--logprobs: only shown with --json; add it")
    params = sampling_params(arguments)
    chat = not arguments.no_chat
    if arguments.batch is not None:
        requests = read_batch(arguments.batch, params, arguments.system, chat=chat)
    else:
        prompt, images = read_prompt(arguments.prompt), tuple(arguments.image)
        videos = tuple(Video(path, arguments.frame_rate or DEFAULT_FRAME_RATE) for path in arguments.video)
        requests = [Request(prompt, arguments.system, params, chat, images, videos)]
    started = time.perf_counter()
    with Engine.load(arguments.engine, threads=arguments.threads) as engine:
        load_ms = (time.perf_counter() - started) * 1e3
        show_stats = arguments.stats or (sys.stderr.isatty() and not arguments.json)
        if arguments.batch is not None:
            print_batch(engine, requests, load_ms, show_stats=show_stats)
        else:
            print_generation(engine, requests[0], load_ms, as_json=arguments.json, show_stats=show_stats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
