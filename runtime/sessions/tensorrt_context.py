"""One execution context: a profile, shapes and addresses, and the work that this makes."""

from collections.abc import Callable, Mapping

from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding
from pop_engine.runtime.sessions.device_call import shape_of
from pop_engine.runtime.sessions.device_memory import DeviceBlock
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.tensorrt_plan import Plan
from pop_engine.runtime.sessions.tensorrt_profile import choose_profile


class PlanContext:
    """A context of a plan, on activation memory that others share: only one may be at work on the stream at a time."""

    def __init__(self, plan: Plan, stream: DeviceStream, activations: DeviceBlock, *, captured: bool) -> None:
        self._plan = plan
        self._stream = stream
        self._context = plan.create_context(captured=captured)
        self._context.set_device_memory(activations.address, activations.num_bytes)
        self._profile: int | None = None

    def prepare(self, dims: Mapping[str, int], address: Callable[[Binding], int]) -> None:
        """Set the shapes of a call and where each of its tensors lies. Raises EngineError where TensorRT refuses."""
        self._use_profile(choose_profile(self._plan.record, dims))
        contract = self._plan.record.contract
        for binding in (*contract.inputs, *contract.weights):
            self._require(self._context.set_input_shape(binding.name, shape_of(binding, dims)), binding.name)
        for binding in (*contract.inputs, *contract.weights, *contract.outputs):
            self._require(self._context.set_tensor_address(binding.name, address(binding)), binding.name)

    def enqueue(self) -> None:
        """Put the work on the stream."""
        self._require(self._context.execute_async_v3(self._stream.handle), "the call")

    @property
    def is_capturable(self) -> bool:
        """Whether the work can become a CUDA graph. TensorRT-RTX can say; TensorRT finds out."""
        asks = getattr(self._context, "is_stream_capturable", None)
        return True if asks is None else bool(asks(self._stream.handle))

    def _use_profile(self, profile: int) -> None:
        if profile != self._profile:
            self._require(self._context.set_optimization_profile_async(profile, self._stream.handle), "the profile")
            self._stream.wait()
            self._profile = profile

    def _require(self, accepted: bool, what: str) -> None:
        if not accepted:
            failure: EngineError = self._plan.messages.failure(f"{self._plan.record.file}: TensorRT refuses {what}")
            raise failure
