"""What is timed in a worker's process: one loaded engine, ours or another's."""

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.tools.bench_message import BenchReply, BenchRequest

Prompts = Sequence[Sequence[int]]


class Subject(Protocol):
    """An engine that holds a batch of sequences and chooses every token greedily."""

    def reserve(self, batch_size: int, max_len: int) -> None:
        """Forget the sequences held so far, and make room for others of up to `max_len` tokens. Not timed."""

    def prefill(self, prompts: Prompts) -> Iterator[int]:
        """The first token of each prompt, as soon as it is there. Prompts are of one length."""

    def decode_step(self, token_ids: Sequence[int]) -> list[int]:
        """The next token of each sequence, after these."""


def time_batch(subject: Subject, request: BenchRequest) -> BenchReply:
    """Run one request."""
    num_steps = request.num_settling_steps + request.num_decode_steps
    subject.reserve(len(request.prompts), max(map(len, request.prompts)) + num_steps)
    ttft_ms, step_ms = [], []
    tokens: list[list[int]] = []
    started = time.perf_counter()
    for token in subject.prefill(request.prompts):
        ttft_ms.append(milliseconds_since(started))
        tokens.append([token])
    for _ in range(num_steps):
        started = time.perf_counter()
        latest = subject.decode_step([generated[-1] for generated in tokens])
        step_ms.append(milliseconds_since(started))
        for generated, token in zip(tokens, latest, strict=True):
            generated.append(token)
    return BenchReply(
        tuple(ttft_ms), tuple(step_ms[request.num_settling_steps :]), peak_memory_bytes(), tuple(map(tuple, tokens))
    )


def milliseconds_since(started: float) -> float:
    """From a time of perf_counter until now."""
    return (time.perf_counter() - started) * 1000
