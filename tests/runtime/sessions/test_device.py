"""The parts that the GPU's sessions are made of, on a simulated GPU: addresses, copies, graphs, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding, CacheShape, GraphContract, KVShape
from pop_engine.configs.plan_record import PlanRecord, ProfileRecord
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions.device import Device, load_driver, open_device
from pop_engine.runtime.sessions.device_buffers import CallBuffers
from pop_engine.runtime.sessions.device_cache import DeviceCache
from pop_engine.runtime.sessions.device_call import call_inputs, dims_of
from pop_engine.runtime.sessions.device_memory import DeviceBlock, PinnedBlock, offsets, total_bytes
from pop_engine.runtime.sessions.device_stream import DeviceStream
from pop_engine.runtime.sessions.device_types import as_float32
from pop_engine.runtime.sessions.device_weights import DeviceWeights
from pop_engine.runtime.sessions.tensorrt_profile import choose_profile, largest_dims
from pop_engine.runtime.weights import MappedTensor
from simulated_gpu import SimulatedGpu, Status

DECODE_PROFILES = (
    ProfileRecord("one-token", {"batch": (1, 1, 8), "seq": (1, 1, 1)}),
    ProfileRecord("few-tokens", {"batch": (1, 1, 8), "seq": (2, 4, 8)}),
)


@pytest.fixture
def gpu() -> SimulatedGpu:
    return SimulatedGpu()


def test_the_real_driver_is_refused_in_one_line() -> None:
    pytest.importorskip("cuda.bindings", reason="needs `pip install 'pop-engine[tensorrt-rtx]'`")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    with pytest.raises(EngineError, match="^no NVIDIA driver: libcuda.so.1 cannot be loaded; install the driver"):
        Device(load_driver())
    with pytest.raises(EngineError, match="^engine: target ort-cuda: no NVIDIA driver: "):
        open_device("engine: target ort-cuda")


def test_a_refusal_of_the_driver_is_named(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuInit", lambda flags: (Status.CUDA_ERROR_NO_DEVICE,))
    with pytest.raises(EngineError, match="cuInit: the NVIDIA driver refuses it .CUDA_ERROR_NO_DEVICE."):
        Device(gpu)


def test_what_a_device_says(gpu: SimulatedGpu) -> None:
    with Device(gpu) as device:
        assert (device.name, device.capability) == ("Simulated GPU", "sm89")
        with DeviceBlock(device, 1 << 20):
            assert device.free_bytes() == (1 << 30) - (1 << 20)
        with pytest.raises(EngineError, match="cuMemAlloc: the GPU is out of memory"):
            DeviceBlock(device, 1 << 31)
    assert gpu.is_clean


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    sizes = {"a": 1, "b": 256, "c": 257, "d": 0}
    assert offsets(sizes) == {"a": 0, "b": 256, "c": 512, "d": 1024}
    assert total_bytes(sizes.values()) == 1024


def test_a_slot_s_cache_is_a_pointer_offset(gpu: SimulatedGpu) -> None:
    """Two layers of different sizes, bf16: slot 3 lies three whole slots behind the pool's beginning."""
    shape = CacheShape((KVShape(2, 64), KVShape(4, 128)), 100, "bf16")
    with Device(gpu) as device:
        cache = DeviceCache(device, shape, num_slots=5)
        first = cache.address("past_key.0", SlotRange(0, 5))
        slot_bytes = {"past_key.0": 2 * 100 * 64 * 2, "past_value.1": 4 * 100 * 128 * 2}
        for name, num_bytes in slot_bytes.items():
            start = cache.address(name, SlotRange(0, 1))
            assert cache.address(name, SlotRange(3, 2)) - start == 3 * num_bytes
        pools = 2 * 5 * (slot_bytes["past_key.0"] + slot_bytes["past_value.1"])
        assert gpu.used_bytes == pools
        assert cache.address("past_value.1", SlotRange(4, 1)) + slot_bytes["past_value.1"] - first == pools
        # NaN would come out of a masked key's 0 times whatever was there.
        assert gpu.read(first, pools) == bytes(pools)
        assert "past_key.1" in cache
        assert "past_key.2" not in cache
        cache.close()


@pytest.mark.parametrize("staging_bytes", [2, 64, 1 << 20])
def test_weights_arrive_whole_through_any_staging(gpu: SimulatedGpu, staging_bytes: int) -> None:
    random = np.random.default_rng(0)
    sizes = {"embed": 1000, "norm": 64, "head": 333}
    tensors = {
        name: MappedTensor(random.integers(0, 256, size, np.uint8), "bf16", (size // 2,))
        for name, size in sizes.items()
    }
    with Device(gpu) as device, DeviceStream(device) as stream:
        weights = DeviceWeights(device, stream, tensors, staging_bytes)
        for name, tensor in tensors.items():
            assert gpu.read(weights.address(name), tensor.content.nbytes) == tensor.content.tobytes()
        assert gpu.uploaded_bytes == sum(sizes.values())
        weights.close()
    assert gpu.is_clean


def test_an_upload_shows_progress_on_a_terminal_alone(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"embed": MappedTensor(np.zeros(1000, np.uint8), "bf16", (500,))}
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        with Device(gpu) as device, DeviceStream(device) as stream:
            DeviceWeights(device, stream, tensors).close()
        assert ("weights: 0.0 of 0.0 GB" in capsys.readouterr().err) == is_terminal


def test_a_graph_runs_again_with_what_its_memory_holds_now(gpu: SimulatedGpu) -> None:
    with Device(gpu) as device, DeviceStream(device) as stream:
        buffers = CallBuffers(device, stream, {io.INPUT_IDS: 16}, logits_bytes=16)

        def work() -> None:
            buffers.upload()
            gpu.put(lambda: gpu.write(buffers.logits_address, gpu.read(buffers.address(io.INPUT_IDS), 16)))
            buffers.download((4,), "fp32")

        buffers.write({io.INPUT_IDS: np.array([1, 2])})
        graph = stream.capture(work)
        stream.wait()
        assert np.isnan(buffers.logits((4,), "fp32")).all(), "capturing runs nothing"
        for ids in ([3, 4], [5, 6]):
            buffers.write({io.INPUT_IDS: np.array(ids)})
            graph.launch()
            stream.wait()
            assert buffers.logits((4,), "fp32").view(np.int64).tolist() == ids
        graph.close()
        buffers.close()
    assert gpu.is_clean


def test_a_failed_capture_ends_the_capture(gpu: SimulatedGpu) -> None:
    def fail() -> None:
        raise EngineError("no")

    with Device(gpu) as device, DeviceStream(device) as stream:
        with pytest.raises(EngineError, match="no"):
            stream.capture(fail)
        stream.wait()


def test_pinned_memory_is_the_host_s(gpu: SimulatedGpu) -> None:
    with Device(gpu) as device, PinnedBlock(device, 8) as pinned:
        pinned.content[:] = range(8)
        assert pinned.content.ctypes.data == pinned.address


@pytest.mark.parametrize(
    ("dtype", "raw"),
    [
        # 1.0, -2.5, infinity and the largest finite number of each dtype.
        ("bf16", np.array([0x3F80, 0xC020, 0x7F80, 0x7F7F], np.uint16)),
        ("fp16", np.array([0x3C00, 0xC100, 0x7C00, 0x7BFF], np.uint16)),
    ],
)
def test_logits_of_16_bits(dtype: str, raw: Any) -> None:
    largest = {"bf16": 3.3895313892515355e38, "fp16": 65504.0}[dtype]
    found = as_float32(raw.view(np.uint8), dtype)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([1.0, -2.5, np.inf, largest])


def plan_of(*profiles: ProfileRecord) -> PlanRecord:
    return PlanRecord("x.plan", "sm89", 0, GraphContract((), ()), profiles, (), (), 0, False, False, 0.0)


@pytest.mark.parametrize(("batch", "seq", "expected"), [(1, 1, 0), (8, 1, 0), (1, 2, 1), (3, 8, 1)])
def test_the_profile_that_takes_a_call(batch: int, seq: int, expected: int) -> None:
    assert choose_profile(plan_of(*DECODE_PROFILES), {"batch": batch, "seq": seq}) == expected


def test_of_two_profiles_the_one_tuned_nearer() -> None:
    wide = ProfileRecord("chunk", {"batch": (1, 1, 1), "seq": (1, 512, 512)})
    assert choose_profile(plan_of(wide, *DECODE_PROFILES), {"batch": 1, "seq": 1}) == 1
    assert choose_profile(plan_of(wide, *DECODE_PROFILES), {"batch": 1, "seq": 300}) == 0
    assert largest_dims(plan_of(wide, *DECODE_PROFILES)) == {"batch": 8, "seq": 512}


@pytest.mark.parametrize("dims", [{"batch": 9, "seq": 1}, {"batch": 1, "seq": 9}])
def test_a_call_that_no_profile_takes(dims: dict[str, int]) -> None:
    with pytest.raises(EngineError, match="x.plan: no profile takes batch ., seq .; build the engine again"):
        choose_profile(plan_of(*DECODE_PROFILES), dims)


def test_the_rows_of_a_call() -> None:
    rows = (Binding(io.CONTEXT_ROWS, (io.NUM_CONTEXT,), "int64"), Binding(io.BOUNDARY_ROWS, (1,), "int64"))
    ids = Binding(io.INPUT_IDS, (io.BATCH, io.SEQ), "int64")
    contract = GraphContract((ids, *rows), ())
    last = call_inputs(contract, np.arange(5)[None], np.array([7]), num_boundary=1)
    assert last[io.CONTEXT_ROWS].tolist() == [0, 1, 2, 3]
    assert last[io.BOUNDARY_ROWS].tolist() == [4]
    between = call_inputs(contract, np.arange(5)[None], np.array([7]), num_boundary=0)
    assert between[io.CONTEXT_ROWS].tolist() == [0, 1, 2, 3, 4]
    assert between[io.BOUNDARY_ROWS].tolist() == [4]
    assert dims_of(contract, between) == {io.BATCH: 1, io.SEQ: 5, io.NUM_CONTEXT: 5}
    assert io.POSITION_IDS not in last
