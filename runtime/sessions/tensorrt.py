"""TensorRT and TensorRT-RTX: two plans, or one, over one copy of the weights and one cache on the GPU."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.manifest import Manifest
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.memory_estimate import device_estimate
from pop_engine.runtime.sessions.device import open_device
from pop_engine.runtime.sessions.device_call import Inputs, dims_of, logits_binding, shape_of
from pop_engine.runtime.sessions.device_memory import DeviceBlock
from pop_engine.runtime.sessions.device_session import DeviceSession
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.device_tensors import CallSpace, DeviceTensors
from pop_engine.runtime.sessions.tensorrt_context import PlanContext
from pop_engine.runtime.sessions.tensorrt_module import load_module
from pop_engine.runtime.sessions.tensorrt_plan import Plan, check_gpu, load_plans, plan_records
from pop_engine.runtime.sessions.tensorrt_profile import largest_dims
from pop_engine.runtime.sessions.tensorrt_step import TokenStep

Shape = tuple[int, ...]


class TensorRTSession(DeviceSession):
    """The targets `tensorrt` and `tensorrt-rtx`.

    Contexts share one activation buffer: all work is on one stream, so no two are ever at work. In the layout with
    one plan, that plan decodes with its boundary row, as ort-cpu's session does.
    Raises EngineError, before a plan is touched, where package, version, driver, GPU or free memory are not what the
    engine needs: a plan deserialised on the wrong machine can crash the process.
    """

    def _open(self, directory: Path, manifest: Manifest, opened: ExitStack) -> None:
        target, records = manifest.target, plan_records(manifest)
        compatible = all(record.version_compatible for record in records)
        trt = load_module(target.name, target.versions[target.name], version_compatible=compatible)
        self._device = opened.enter_context(open_device(f"{directory}: target {target.name} for {records[0].gpu}"))
        check_gpu(records, self._device)
        spaces = [CallSpace(record.contract, largest_dims(record)) for record in records]
        self._vocab_size, self._dtype = manifest.dims.vocab_size, manifest.cache.dtype
        estimate = device_estimate(manifest, num_rows=max(space.num_rows for space in spaces))
        where = f"{directory}: GPU 0 ({self._device.name})"
        estimate.check(self._device.free_bytes(), where)

        self._stream = opened.enter_context(DeviceStream(self._device))
        self._steps: dict[SlotRange, TokenStep] = {}
        self._contexts: dict[str, PlanContext] = {}
        self._prefill, self._decode = load_plans(trt, directory, records)
        opened.callback(self._drop)
        self._prefill_contract, self._decode_contract = self._prefill.record.contract, self._decode.record.contract
        self._decode_rows = spaces[1].largest[io.SEQ] if self._decode is not self._prefill else 1
        activation_bytes = max(self._prefill.activation_bytes, self._decode.activation_bytes)
        # Where the plan holds the weights, they are on the GPU by now.
        left_bytes = estimate.weights_bytes if records[1].contract.weights else 0
        exact = replace(estimate, weights_bytes=left_bytes, activation_bytes=activation_bytes)
        exact.check(self._device.free_bytes(), where)
        self._activations = opened.enter_context(DeviceBlock(self._device, activation_bytes))
        self._tensors = DeviceTensors(self._device, self._stream, directory, manifest, spaces)
        opened.callback(self._tensors.close)

    def _max_rows(self, slots: SlotRange) -> int:
        return self._decode_rows

    def _run_prefill(self, slots: SlotRange, inputs: Inputs, *, wants_logits: bool) -> NDArray[np.float32] | None:
        shape = self._run(self._prefill, "prefill", slots, inputs, wants_logits=wants_logits)
        return self._tensors.buffers.logits(shape, self._dtype) if wants_logits else None

    def _run_decode(self, slots: SlotRange, inputs: Inputs) -> NDArray[np.float32]:
        if inputs[io.INPUT_IDS].shape[1] == 1:
            shape = self._token_step(slots, inputs)
        else:
            shape = self._run(self._decode, "few tokens", slots, inputs, wants_logits=True)
        return self._tensors.buffers.logits(shape, self._dtype)

    def _run(self, plan: Plan, use: str, slots: SlotRange, inputs: Inputs, *, wants_logits: bool) -> Shape:
        """Run a call whose shapes are its own, and wait for it. Returns the shape of its logits."""
        context = self._context(plan, use)
        shape = self._prepare(plan, context, slots, inputs)
        self._put(context, shape if wants_logits else None)
        self._stream.wait()
        return shape

    def _token_step(self, slots: SlotRange, inputs: Inputs) -> Shape:
        """Run the step of one new token a slot; the first time for these slots it is set up."""
        step = self._steps.get(slots)
        if step is None:
            context = PlanContext(self._decode, self._stream, self._activations, captured=True)
            shape = self._prepare(self._decode, context, slots, inputs)
            work = partial(self._put, context, shape)
            step = self._steps[slots] = TokenStep(context, self._stream, work, shape)
        else:
            self._tensors.buffers.write(inputs)
        step.run()
        return step.logits_shape

    def _context(self, plan: Plan, use: str) -> PlanContext:
        """The context of a use whose shapes change from call to call."""
        if use not in self._contexts:
            self._contexts[use] = PlanContext(plan, self._stream, self._activations, captured=False)
        return self._contexts[use]

    def _prepare(self, plan: Plan, context: PlanContext, slots: SlotRange, inputs: Inputs) -> Shape:
        """Set a call up: shapes, addresses, contents of the inputs. Returns the shape of its logits."""
        contract = plan.record.contract
        dims = dims_of(contract, inputs)
        context.prepare(dims, lambda binding: self._tensors.address(binding, slots))
        self._tensors.buffers.write(inputs)
        logits = logits_binding(contract)
        return (0, 0, 0) if logits is None else shape_of(logits, dims)

    def _put(self, context: PlanContext, shape: Shape | None) -> None:
        """Put a call on the stream: inputs up, the plan, and logits of this shape down."""
        self._tensors.buffers.upload()
        context.enqueue()
        if shape is not None:
            self._tensors.buffers.download(shape, self._dtype)

    def _drop(self) -> None:
        """Graphs and contexts go before their plans, and all before the GPU's context."""
        for step in self._steps.values():
            step.close()
        self._steps.clear()
        self._contexts.clear()
        del self._prefill, self._decode
