"""What the benchmarks and their workers say to each other, one JSON line each way."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pop_engine.runtime.memory import peak_memory_bytes


@dataclass(frozen=True)
class BenchRequest:
    """Prefill each prompt, then decode all of them together, greedily.

    The `num_settling_steps` first decode steps are not timed; `num_decode_steps` follow that are. With `concurrency`
    the prompts are requests, so many of which are in flight at once: one that is finished makes room for the next.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_decode_steps: int = 0
    num_settling_steps: int = 0
    concurrency: int | None = None


@dataclass(frozen=True)
class BenchReply:
    """Wall times in milliseconds, argmax included, and the process's peak size.

    `ttft_ms` has each prompt's first token from the start of the request, `step_ms` each decode step, `tokens` what
    was generated for each prompt. Under a load `token_ms` has instead, for each prompt, when its tokens came after it
    had arrived. The first reply of a worker is empty: it says that the engine is loaded.
    """

    ttft_ms: tuple[float, ...]
    step_ms: tuple[float, ...]
    peak_memory_bytes: int
    tokens: tuple[tuple[int, ...], ...] = ()
    token_ms: tuple[tuple[float, ...], ...] = ()
    wall_ms: float = 0.0


def serve(answer: Callable[[BenchRequest], BenchReply]) -> None:
    """Say that the engine is loaded, then answer each request line with a reply line until stdin ends."""
    _send(BenchReply((), (), peak_memory_bytes()))
    for line in sys.stdin:
        _send(answer(msgspec.json.decode(line, type=BenchRequest)))


def _send(reply: BenchReply) -> None:
    print(msgspec.json.encode(reply).decode(), flush=True)
