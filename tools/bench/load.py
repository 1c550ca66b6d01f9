"""Many requests through an engine's continuous batching, a fixed number of them in flight."""

import time
from collections import deque

from pop_engine.runtime.engine import Engine
from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.runtime.sampling import SamplingParams
from pop_engine.runtime.scheduler import Scheduler
from pop_engine.runtime.sequence import Sequence
from pop_engine.tools.bench.subject import milliseconds_since
from pop_engine.tools.bench_message import BenchReply, BenchRequest


def time_load(engine: Engine, request: BenchRequest) -> BenchReply:
    """Run every prompt of the request to its last token.

    A request arrives when one before it is finished, so there are always `concurrency` of them, in slots or waiting
    for one. No end token stops a sequence: all are equally long.
    """
    assert request.concurrency is not None
    scheduler = Scheduler(engine)
    params = SamplingParams(max_tokens=1 + request.num_decode_steps)
    waiting = deque(enumerate(request.prompts))
    arrived = [0.0] * len(request.prompts)
    token_ms: list[list[float]] = [[] for _ in request.prompts]
    tokens: list[list[int]] = [[] for _ in request.prompts]

    def admit() -> None:
        index, prompt = waiting.popleft()
        arrived[index] = time.perf_counter()
        # Without a tokenizer there is neither an end token nor text to put together.
        scheduler.add(index, Sequence(prompt, params, None, engine.manifest.limits.max_seq_len))

    started = time.perf_counter()
    for _ in range(min(request.concurrency, len(waiting))):
        admit()
    for event in scheduler.run():
        token_ms[event.index].append(milliseconds_since(arrived[event.index]))
        tokens[event.index].append(event.piece.token.token_id)
        if event.result is not None and waiting:
            admit()
    wall_ms = milliseconds_since(started)
    return BenchReply((), (), peak_memory_bytes(), tuple(map(tuple, tokens)), tuple(map(tuple, token_ms)), wall_ms)
