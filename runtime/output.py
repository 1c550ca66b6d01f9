"""What pop-run prints: streamed text, JSON for programs, statistics."""

import sys
import time

import msgspec

from pop_engine.runtime.engine import Engine
from pop_engine.runtime.memory import peak_memory_bytes
from pop_engine.runtime.requests import Request
from pop_engine.runtime.sequence import Generation, Metrics


def print_generation(engine: Engine, request: Request, load_ms: float, *, as_json: bool, show_stats: bool) -> None:
    """Run one request; stream its text, or print it as one JSON object."""
    _speak_utf8()
    result: Generation | None = None
    for event in engine.run_batch([request.encode(engine)], [request.params]):
        if not as_json:
            sys.stdout.write(event.piece.text)
            sys.stdout.flush()
        result = event.result or result
    assert result is not None
    if as_json:
        _print_json({**msgspec.to_builtins(result), **_costs(load_ms)})
    else:
        # A prompt in the shell starts on its own line; a pipe gets the text as it is.
        sys.stdout.write("\n" if sys.stdout.isatty() else "")
        sys.stdout.flush()
    if show_stats:
        sys.stderr.write(_describe(result.metrics, load_ms))


def print_batch(engine: Engine, requests: list[Request], load_ms: float, *, show_stats: bool) -> None:
    """Run many requests; print each as a JSON line when it is finished, with the index of its line."""
    _speak_utf8()
    prompts = [request.encode(engine) for request in requests]
    started = time.perf_counter()
    num_tokens = 0
    for event in engine.run_batch(prompts, [request.params for request in requests]):
        num_tokens += 1
        if event.result is not None:
            _print_json({"index": event.index, **msgspec.to_builtins(event.result)})
    if show_stats:
        seconds = time.perf_counter() - started
        sys.stderr.write(
            f"{len(requests)} prompts, {num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s, "
            f"loaded in {load_ms:.0f} ms, {peak_memory_bytes() / 1e6:,.0f} MB at the peak\n"
        )


def _describe(metrics: Metrics, load_ms: float) -> str:
    speed = f", {1e3 / metrics.tpot_ms:.1f} tokens/s ({metrics.tpot_ms:.1f} ms each)" if metrics.tpot_ms else ""
    return (
        f"{metrics.num_prompt_tokens} prompt tokens, first token after {metrics.ttft_ms:.0f} ms; "
        f"{metrics.num_output_tokens} tokens{speed}; loaded in {load_ms:.0f} ms, "
        f"{peak_memory_bytes() / 1e6:,.0f} MB at the peak\n"
    )


def _costs(load_ms: float) -> dict[str, float]:
    return {"load_ms": load_ms, "peak_memory_bytes": peak_memory_bytes()}


def _print_json(content: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
    sys.stdout.flush()


def _speak_utf8() -> None:
    """Text is UTF-8 whatever the locale says."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
