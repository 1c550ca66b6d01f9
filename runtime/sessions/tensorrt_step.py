"""The decode step of a range of slots: run once, captured, and from then on launched as a CUDA graph."""

from collections.abc import Callable

from pop_engine.runtime.sessions.device_stream import DeviceGraph, DeviceStream
from pop_engine.runtime.sessions.tensorrt_context import PlanContext


class TokenStep:
    """One new token in each slot of a range. `work` puts the whole step on the stream, copies included.

    It has its context for itself: a captured graph stays tied to the shapes and addresses that its context had
    (TensorRT's developer guide, CUDA graphs). The first step is not captured, for a context is set up by its first
    call. `logits_shape` is what `work` downloads.
    """

    def __init__(
        self, context: PlanContext, stream: DeviceStream, work: Callable[[], None], logits_shape: tuple[int, ...]
    ) -> None:
        self.logits_shape = logits_shape
        self._context = context
        self._stream = stream
        self._work = work
        self._graph: DeviceGraph | None = None

    def run(self) -> None:
        """Run the step and wait for it."""
        if self._graph is not None:
            self._graph.launch()
            self._stream.wait()
            return
        self._work()
        self._stream.wait()
        if self._context.is_capturable:
            self._graph = self._stream.capture(self._work)

    def close(self) -> None:
        """Free the graph."""
        if self._graph is not None:
            self._graph.close()
            self._graph = None
