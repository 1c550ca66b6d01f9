"""The session for CUDA on a simulated GPU, where ONNX Runtime's CPU provider runs the graphs: against PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from engine_kit import SMALL, EngineKit, TinyModels, chunks_of, random_tokens, relative_error, taken_slots
from pop_engine.builder.compile import ort_cuda as ort_cuda_target
from pop_engine.configs import build_config
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Boundary
from pop_engine.runtime import Engine
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions import device, ort_cuda
from pop_reference import decode, pop_prefill
from simulated_gpu import SimulatedGpu

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOLERANCE = 1e-4
TAIL = 2
MAX_SEQ_LEN, NUM_SLOTS, CHUNK = 48, 4, 16
# The two-step graphs are two traces more, and test_tensorrt_session.py has them.
boundaries = pytest.mark.parametrize("boundary", ["one-pass", pytest.param("two-step", marks=pytest.mark.nightly)])


class InStreamOrder:
    """A session whose work begins when what is on the stream before it has run."""

    def __init__(self, session: ort.InferenceSession, gpu: SimulatedGpu) -> None:
        self._session = session
        self._gpu = gpu
        self.io_binding = session.io_binding

    def run_with_iobinding(self, binding: Any) -> None:
        self._gpu.flush()
        self._session.run_with_iobinding(binding)


def directory_of(build_engine: EngineKit, tiny: TinyModels, boundary: Boundary) -> Path:
    """Built in fp32, which CUDA's attention lacks and the CPU's has. So the table of CUDA's kernels is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_config, "SUPPORTED_TARGETS", {**build_config.SUPPORTED_TARGETS, "ort-cuda": ("fp32",)})
        patch.setattr(ort_cuda_target, "check_partition", lambda *_: None)
        return build_engine.directory(
            tiny.checkpoint(),
            target="ort-cuda",
            dtype="fp32",
            boundary=boundary,
            tail_layers=TAIL,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=NUM_SLOTS,
            max_prefill_len=CHUNK,
        )


@contextmanager
def loaded(directory: Path) -> Iterator[tuple[Engine, SimulatedGpu]]:
    gpu = SimulatedGpu()

    def load(graph: Path, stream: object) -> Any:
        return InStreamOrder(ort.InferenceSession(graph, providers=["CPUExecutionProvider"]), gpu)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "load_driver", lambda: gpu)
        patch.setattr(ort_cuda, "require_provider", lambda: None)
        patch.setattr(ort_cuda, "load_graph", load)
        patch.setattr(ort_cuda, "DEVICE_TYPE", "cpu")
        with Engine.load(directory) as engine:
            yield engine, gpu
    assert gpu.is_clean, "closing an engine frees all that it took"


@boundaries
@pytest.mark.parametrize("num_tokens", [1, 2, 13, CHUNK + 1, 3 * CHUNK - 4])
def test_prefill_and_decode_equal_the_reference(
    build_engine: EngineKit, tiny: TinyModels, boundary: Boundary, num_tokens: int
) -> None:
    model, prompt = tiny.hf_model(SMALL), random_tokens(num_tokens, seed=num_tokens)
    expected, cache = pop_prefill(model, prompt, TAIL)
    directory = directory_of(build_engine, tiny, boundary)
    with loaded(directory) as (engine, _), taken_slots(engine, NUM_SLOTS) as slots:
        assert relative_error(engine.prefill(slots[-1], prompt), expected.numpy()) < TOLERANCE
        for token in random_tokens(4, seed=1):
            found = engine.decode_step([slots[-1]], [token])[0]
            assert relative_error(found, decode(model, cache, [token])[-1].numpy()) < TOLERANCE


@boundaries
def test_slots_of_different_lengths_decode_together(
    build_engine: EngineKit, tiny: TinyModels, boundary: Boundary
) -> None:
    model = tiny.hf_model(SMALL)
    prompts = [random_tokens(length, seed=length) for length in (5, 21, 9)]
    expected = [pop_prefill(model, prompt, TAIL) for prompt in prompts]
    with loaded(directory_of(build_engine, tiny, boundary)) as (engine, _), taken_slots(engine, 4) as (_, *slots):
        for slot, prompt in zip(slots, prompts, strict=True):
            engine.prefill(slot, prompt)
        for tokens in ([1, 2, 3], [4, 5, 6]):
            found = engine.decode_step(slots, tokens)
            for row, token, (_, cache) in zip(found, tokens, expected, strict=True):
                assert relative_error(row, decode(model, cache, [token])[-1].numpy()) < TOLERANCE


def test_several_new_tokens_of_one_sequence_and_of_several(build_engine: EngineKit, tiny: TinyModels) -> None:
    model, prompt, new = tiny.hf_model(SMALL), random_tokens(5), random_tokens(11, seed=3)
    with loaded(directory_of(build_engine, tiny, "one-pass")) as (engine, _), taken_slots(engine, 2):
        for slot in (0, 1):
            engine.prefill(slot, prompt)
        session: Any = engine._session
        for slots in (SlotRange(0, 1), SlotRange(0, 2)):
            _, cache = pop_prefill(model, prompt, TAIL)
            wanted = decode(model, cache, new).numpy()
            found = session.decode(slots, np.array([new] * slots.count), np.full(slots.count, len(prompt)))
            for row in found:
                assert relative_error(row, wanted) < TOLERANCE


def test_chunks_of_any_size_give_the_same(build_engine: EngineKit, tiny: TinyModels) -> None:
    prompt = random_tokens(MAX_SEQ_LEN)
    expected, _ = pop_prefill(tiny.hf_model(SMALL), prompt, TAIL)
    with loaded(directory_of(build_engine, tiny, "one-pass")) as (engine, _):
        for size in (1, 7, 15):
            with chunks_of(engine, size), taken_slots(engine, NUM_SLOTS) as slots:
                assert relative_error(engine.prefill(slots[-1], prompt), expected.numpy()) < TOLERANCE


def test_both_graphs_read_one_copy_of_the_weights(build_engine: EngineKit, tiny: TinyModels) -> None:
    directory = directory_of(build_engine, tiny, "one-pass")
    with loaded(directory) as (engine, gpu):
        assert engine.manifest.weights is not None
        assert gpu.uploaded_bytes == engine.manifest.weights.num_bytes
        assert {b.name for b in engine.manifest.prefill.contract.weights} <= {
            b.name for b in engine.manifest.decode.contract.weights
        }


def test_the_cpu_s_onnx_runtime_is_refused(build_engine: EngineKit, tiny: TinyModels) -> None:
    """The package that pop-engine depends on has no CUDA provider."""
    with pytest.raises(EngineError, match="has no CUDAExecutionProvider; `pip uninstall -y onnxruntime; pip install"):
        Engine.load(directory_of(build_engine, tiny, "one-pass"))


def test_without_a_driver_it_stops_at_the_driver(
    build_engine: EngineKit, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs `pip install 'pop-engine[cuda]'`")
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(EngineError, match="target ort-cuda: no NVIDIA driver: libcuda.so.1 cannot be loaded"):
        Engine.load(directory_of(build_engine, tiny, "one-pass"))
