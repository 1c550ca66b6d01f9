"""How long calls take on a device: CUDA graphs where they fit, alternating runs, and what the device can do at best."""

import time
from collections.abc import Callable, Mapping

import torch

from pop_engine.tools.bound import MachineRates
from pop_engine.tools.spread import Spread

Call = Callable[[], object]

_MIN_RUNS, _MAX_RUNS = 3, 20
_MILLISECONDS = 1000


def capture(call: Call) -> Call:
    """The call as a CUDA graph, warmed up; its tensors live as long as the result."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_alternating(calls: Mapping[str, Call], device: str, seconds: float) -> dict[str, Spread]:
    """Each call's time in milliseconds. One run of each is for warming up, then they take turns.

    There are 3 to 20 turns: as many as fit into `seconds`.
    """
    first = [_milliseconds(call, device) for call in calls.values()]
    turns = int(seconds * _MILLISECONDS / max(sum(first), 1e-3))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(min(max(turns, _MIN_RUNS), _MAX_RUNS)):
        for name, call in calls.items():
            samples[name].append(_milliseconds(call, device))
    return {name: Spread.of(own) for name, own in samples.items()}


def measure_rates(device: str, dtype: torch.dtype, seconds: float, *, is_tiny: bool) -> MachineRates:
    """FLOPs per second of a large matrix product, and bytes per second of copying, what is read and written counted."""
    size, num_bytes = (256, 1 << 22) if is_tiny else (8192, 1 << 32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(num_bytes, device=device, dtype=torch.uint8)
    copy = torch.empty_like(source)
    times = time_alternating({"product": lambda: left @ right, "copy": lambda: copy.copy_(source)}, device, seconds)
    return MachineRates(
        flops_per_second=2 * size**3 / (times["product"].min / _MILLISECONDS),
        bytes_per_second=2 * num_bytes / (times["copy"].min / _MILLISECONDS),
    )


def _milliseconds(call: Call, device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * _MILLISECONDS
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
