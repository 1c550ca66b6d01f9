"""Plans: deserialised for one GPU, after what the manifest knows about them has been checked."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.plan_record import PlanRecord
from pop_engine.plugins.tensorrt_messages import Messages, Module
from pop_engine.runtime.sessions.device import Device


def plan_records(manifest: Manifest) -> tuple[PlanRecord, PlanRecord]:
    """What prefill and what decode run on: one plan may be both.

    Raises EngineError where the manifest has no plan for one of them.
    """
    prefill = manifest.prefill.plan
    decode = prefill if manifest.target.decode_with == "prefill" else manifest.decode.plan
    if prefill is None or decode is None:
        raise EngineError(f"target {manifest.target.name}: the manifest names no plans; build the engine again")
    return prefill, decode


def check_gpu(records: Iterable[PlanRecord], device: Device) -> None:
    """Raise EngineError for a GPU that a plan was not compiled for. TensorRT itself would crash on some."""
    for record in records:
        if record.gpu != device.capability:
            raise EngineError(
                f"{record.file}: compiled for {record.gpu}, and this machine's GPU is {device.name}, "
                f"{device.capability}; build the engine for that"
            )


def load_plans(trt: Module, directory: Path, records: tuple[PlanRecord, PlanRecord]) -> tuple["Plan", "Plan"]:
    """Deserialise the plans of prefill and decode, once where they are the same one."""
    messages = Messages(trt)
    runtime = trt.Runtime(messages.logger)
    prefill, decode = records
    plan = Plan(trt, runtime, messages, directory, prefill)
    return plan, plan if decode is prefill else Plan(trt, runtime, messages, directory, decode)


class Plan:
    """One deserialised plan. `activation_bytes` is what any of its contexts needs while it runs."""

    def __init__(self, trt: Module, runtime: Any, messages: Messages, directory: Path, record: PlanRecord) -> None:
        self.trt = trt
        # TensorRT keeps no hold on what made an engine.
        self._runtime = runtime
        self.record = record
        self.messages = messages
        path = directory / record.file
        # Mapped, not read: with the weights inside it can be as large as they are.
        self.engine = runtime.deserialize_cuda_engine(np.memmap(path, mode="r"))
        if self.engine is None:
            raise messages.failure(f"{path}: TensorRT {trt.__version__} cannot load it")
        self._check_bindings(path)
        self.activation_bytes = int(self.engine.device_memory_size_v2)
        self._cache: Any = None

    def create_context(self, *, captured: bool) -> Any:
        """An execution context without activation memory of its own.

        TensorRT-RTX compiles kernels when a context first meets a shape. One whose work is `captured` must have
        them at once; another starts with general ones and gets the special ones as they are ready.
        """
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        kinds = getattr(self.trt, "DynamicShapesKernelSpecializationStrategy", None)
        if kinds is None:
            context = self.engine.create_execution_context(strategy)
        else:
            config = self.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if captured else kinds.LAZY
            # One cache for all contexts: what one has compiled, the others need not.
            self._cache = self._cache or config.create_runtime_cache()
            config.set_runtime_cache(self._cache)
            context = self.engine.create_execution_context(config)
        if context is None:
            raise self.messages.failure(f"{self.record.file}: TensorRT makes no execution context")
        return context

    def _check_bindings(self, path: Path) -> None:
        contract = self.record.contract
        declared = {binding.name for binding in (*contract.inputs, *contract.weights, *contract.outputs)}
        found = {self.engine.get_tensor_name(idx) for idx in range(self.engine.num_io_tensors)}
        if found != declared:
            raise EngineError(f"{path}: {min(found ^ declared)} is not in both plan and manifest; build again")
        for binding in contract.outputs:
            if binding.alias is not None and self.engine.get_aliased_input_tensor(binding.name) != binding.alias:
                raise EngineError(f"{path}: {binding.name} is not written over {binding.alias}; build again")
