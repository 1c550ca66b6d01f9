"""The process in which one engine answers and scores for pop-eval: a request line on stdin, a reply line on stdout."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import exit_with_message
from pop_engine.runtime.engine import Engine
from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.runtime.sampling import SamplingParams
from pop_engine.tools.bench_message import BenchReply
from pop_engine.tools.evaluation.likelihood import divergence, log_softmax, walk_answers
from pop_engine.tools.evaluation.message import (
    AnswerScore,
    EvalRequest,
    GenerateReply,
    GenerateRequest,
    GreedyAnswer,
    ScoreReply,
    ScoreRequest,
    TtftReply,
    TtftRequest,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Load the engine and serve requests until stdin ends."""
    parser = argparse.ArgumentParser(prog="worker", description="Answer and score for pop-eval.")
    parser.add_argument("engine", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args(argv)
    return exit_with_message("worker", lambda: serve(arguments.engine, arguments.threads))


def serve(path: Path, threads: int | None) -> int:
    """Answer each request line with a reply line."""
    with Engine.load(path, threads=threads) as engine:
        _send(BenchReply((), (), peak_memory_bytes()))
        for line in sys.stdin.buffer:
            _send(reply_to(engine, msgspec.json.decode(line, type=EvalRequest)))
    return 0


def reply_to(engine: Engine, request: EvalRequest) -> ScoreReply | GenerateReply | TtftReply:
    """Run one request."""
    if isinstance(request, ScoreRequest):
        return ScoreReply(score(engine, request), peak_memory_bytes())
    if isinstance(request, GenerateRequest):
        return GenerateReply(generate(engine, request), peak_memory_bytes())
    return TtftReply(time_first_token(engine, request), peak_memory_bytes())


def score(engine: Engine, request: ScoreRequest) -> tuple[AnswerScore, ...]:
    """Log-probability of every answer token; compared with the logits of another engine where they are given."""
    cases = request.cases
    starts = np.cumsum([0, *(len(case.answer) for case in cases)])
    written = _open_logits(request.write_logits, int(starts[-1]), engine.manifest.dims.vocab_size)
    expected = None if request.read_logits is None else np.load(request.read_logits, mmap_mode="r")
    logprobs: list[list[float]] = [[] for _ in cases]
    kl: list[list[float]] = [[] for _ in cases]
    same_top1: list[list[bool]] = [[] for _ in cases]
    for idx, position, logits in walk_answers(engine, cases):
        found = log_softmax(logits)
        logprobs[idx].append(float(found[cases[idx].answer[position]]))
        row = starts[idx] + position
        if written is not None:
            written[row] = logits
        if expected is not None:
            kl[idx].append(divergence(log_softmax(expected[row]), found))
            same_top1[idx].append(bool(expected[row].argmax() == logits.argmax()))
    per_case = zip(logprobs, kl, same_top1, strict=True)
    return tuple(AnswerScore(tuple(of_tokens), tuple(of_kl), tuple(same)) for of_tokens, of_kl, same in per_case)


def generate(engine: Engine, request: GenerateRequest) -> tuple[GreedyAnswer, ...]:
    """Greedy answers, batched over the slots."""
    answers: dict[int, GreedyAnswer] = {}
    params = [SamplingParams(max_tokens=request.max_tokens)] * len(request.prompts)
    for event in engine.run_batch(request.prompts, params):
        if event.result is not None:
            answers[event.index] = GreedyAnswer(event.result.token_ids, event.result.text)
    return tuple(answers[index] for index in range(len(request.prompts)))


def time_first_token(engine: Engine, request: TtftRequest) -> float:
    """Milliseconds of a prefill and an argmax; the slot is taken and given back outside."""
    slot = engine.allocate_slot()
    start = time.perf_counter()
    engine.prefill(slot, request.prompt).argmax()
    elapsed = time.perf_counter() - start
    engine.free_slot(slot)
    return elapsed * 1e3


def _open_logits(path: str | None, num_rows: int, vocab_size: int) -> NDArray[np.float32] | None:
    if path is None:
        return None
    opened: NDArray[np.float32] = np.lib.format.open_memmap(path, "w+", np.float32, (num_rows, vocab_size))
    return opened


def _send(reply: BenchReply | ScoreReply | GenerateReply | TtftReply) -> None:
    # Answers may be in any language, whatever the locale.
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
