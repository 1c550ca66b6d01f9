"""What bench and its workers say to each other, one JSON line each way."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BenchRequest:
    """Prefill each prompt into a slot of its own, then decode all of them together, greedily.

    The `num_settling_steps` first decode steps are not timed; `num_decode_steps` follow that are.
    """

    prompts: tuple[tuple[int, ...], ...]
    num_decode_steps: int = 0
    num_settling_steps: int = 0


@dataclass(frozen=True)
class BenchReply:
    """Wall time of each prompt's first token and of each decode step, argmax included, and the process's peak size.

    The first reply of a worker is empty: it says that the engine is loaded.
    """

    ttft_ms: tuple[float, ...]
    step_ms: tuple[float, ...]
    peak_memory_bytes: int
