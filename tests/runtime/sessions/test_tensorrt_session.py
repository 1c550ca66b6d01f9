"""The TensorRT session on a simulated GPU, which runs the lowered graphs: every number against PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_kit import SMALL, EngineKit, TinyModels, chunks_of, random_tokens, relative_error, taken_slots
from pop_engine.configs.io_contract import Boundary, past_key, past_value
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.plan_options import EngineLayout
from pop_engine.runtime import Engine
from pop_engine.runtime.kv_cache import SlotRange
from pop_engine.runtime.sessions import device, tensorrt
from pop_engine.runtime.sessions.tensorrt_plan import plan_records
from pop_reference import decode, pop_prefill
from simulated_gpu import SimulatedGpu
from simulated_tensorrt import SimulatedTensorRT, cached_rows, simulated_compiler

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOLERANCE = 1e-4
TAIL = 2
MAX_SEQ_LEN, NUM_SLOTS, CHUNK = 48, 4, 16
Form = tuple[Boundary, EngineLayout]
FORMS: tuple[Form, ...] = (("one-pass", "split"), ("two-step", "split"), ("one-pass", "single"))
forms = pytest.mark.parametrize("form", FORMS, ids="-".join)


@dataclass
class Loaded:
    """An engine, and the GPU that it runs on."""

    engine: Engine
    gpu: SimulatedGpu
    trt: SimulatedTensorRT

    def cache(self, slot: int) -> Any:
        """All that a slot holds, [layers, K and V, H_kv, tokens, D]."""
        session: Any = self.engine._session
        tensors, cache = session._tensors._cache, self.engine.manifest.cache
        length = int(self.engine._slots.lengths[slot])
        shape = (cache.layers[0].num_key_value_heads, cache.max_seq_len, cache.layers[0].head_dim)
        found = [
            [
                cached_rows(self.gpu, tensors.address(name(idx), SlotRange(slot, 1)), shape)
                for name in (past_key, past_value)
            ]
            for idx in range(len(cache.layers))
        ]
        return np.array(found)[:, :, :, :length]


def directory_of(build_engine: EngineKit, tiny: TinyModels, form: Form) -> Path:
    with simulated_compiler():
        return build_engine.directory(
            tiny.checkpoint(),
            target="tensorrt-rtx",
            dtype="fp32",
            boundary=form[0],
            engine_layout=form[1],
            tail_layers=TAIL,
            max_seq_len=MAX_SEQ_LEN,
            max_batch_size=NUM_SLOTS,
            max_prefill_len=CHUNK,
        )


@contextmanager
def loaded(directory: Path, *, rtx: bool = True) -> Iterator[Loaded]:
    gpu = SimulatedGpu()
    trt = SimulatedTensorRT(gpu, directory, plan_records(Manifest.load(directory)), rtx=rtx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "load_driver", lambda: gpu)
        patch.setattr(tensorrt, "load_module", lambda *_, **__: trt)
        with Engine.load(directory) as engine:
            yield Loaded(engine, gpu, trt)
    assert gpu.is_clean, "closing an engine frees all that it took"


@forms
@pytest.mark.parametrize("num_tokens", [1, 2, 13, CHUNK, CHUNK + 1, 3 * CHUNK - 4])
def test_prefill_and_decode_equal_the_reference(
    build_engine: EngineKit, tiny: TinyModels, form: Form, num_tokens: int
) -> None:
    model, prompt = tiny.hf_model(SMALL), random_tokens(num_tokens, seed=num_tokens)
    expected, cache = pop_prefill(model, prompt, TAIL)
    with loaded(directory_of(build_engine, tiny, form)) as run, taken_slots(run.engine, NUM_SLOTS) as slots:
        # The last slot: a write behind its end would leave the allocation.
        slot = slots[-1]
        assert relative_error(run.engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE
        for token in random_tokens(4, seed=1):
            found = run.engine.decode_step([slot], [token])[0]
            assert relative_error(found, decode(model, cache, [token])[-1].numpy()) < TOLERANCE
        pairs = zip(cache.keys, cache.values, strict=True)
        held = np.stack([[key[0].numpy(), value[0].numpy()] for key, value in pairs])
        assert relative_error(run.cache(slot), held) < TOLERANCE


@forms
def test_slots_of_different_lengths_decode_together(build_engine: EngineKit, tiny: TinyModels, form: Form) -> None:
    model = tiny.hf_model(SMALL)
    prompts = [random_tokens(length, seed=length) for length in (5, 21, 9)]
    expected = [pop_prefill(model, prompt, TAIL) for prompt in prompts]
    steps = [random_tokens(3, seed=step) for step in range(4)]
    with loaded(directory_of(build_engine, tiny, form)) as run, taken_slots(run.engine, 4) as (_, *slots):
        for slot, prompt in zip(slots, prompts, strict=True):
            run.engine.prefill(slot, prompt)
        for tokens in steps:
            found = run.engine.decode_step(slots, tokens)
            for row, token, (_, cache) in zip(found, tokens, expected, strict=True):
                assert relative_error(row, decode(model, cache, [token])[-1].numpy()) < TOLERANCE
        # A first step for the three slots as one range, then launches of what was captured.
        assert (run.gpu.calls["cuStreamBeginCapture"], run.gpu.calls["cuGraphLaunch"]) == (1 + _captured(form), 3)


def _captured(form: Form) -> int:
    """Two-step prefills end in a decode step of their slot, each of which is captured too."""
    return 3 if form[0] == "two-step" else 0


def test_a_graph_is_captured_for_each_range_of_slots(build_engine: EngineKit, tiny: TinyModels) -> None:
    with loaded(directory_of(build_engine, tiny, FORMS[0])) as run, taken_slots(run.engine, 4) as slots:
        for slot in slots:
            run.engine.prefill(slot, random_tokens(3))
        for step_slots in ([0, 1, 2], [0, 1, 2], [2], [2], [0, 1, 2]):
            run.engine.decode_step(step_slots, [7] * len(step_slots))
        assert run.gpu.calls["cuStreamBeginCapture"] == 2
        assert run.gpu.calls["cuGraphLaunch"] == 3


def test_weights_are_uploaded_once_and_are_the_file_s(build_engine: EngineKit, tiny: TinyModels) -> None:
    from safetensors import safe_open

    directory = directory_of(build_engine, tiny, FORMS[0])
    with loaded(directory) as run, safe_open(directory / "weights" / "model.safetensors", framework="np") as file:
        weights: Any = run.engine._session._tensors._weights  # type: ignore[union-attr]
        names = [binding.name for binding in run.engine.manifest.decode.contract.weights]
        for name in names:
            content = file.get_tensor(name)
            assert run.gpu.read(weights.address(name), content.nbytes) == content.tobytes()
        assert set(names) == set(file.keys())
        assert run.gpu.uploaded_bytes == sum(file.get_tensor(name).nbytes for name in names)


def test_a_single_plan_has_its_weights_inside(build_engine: EngineKit, tiny: TinyModels) -> None:
    with loaded(directory_of(build_engine, tiny, ("one-pass", "single"))) as run:
        assert run.gpu.uploaded_bytes == 0


def test_a_chunk_that_another_follows_gives_all_its_rows_as_context(build_engine: EngineKit, tiny: TinyModels) -> None:
    with loaded(directory_of(build_engine, tiny, FORMS[0])) as run, taken_slots(run.engine, 1) as (slot,):
        run.engine.prefill(slot, random_tokens(2 * CHUNK + 3))
        shapes = [(call["input_ids"], call["context_rows"]) for call in run.trt.executed]
        assert shapes == [((1, CHUNK), (CHUNK,)), ((1, CHUNK), (CHUNK,)), ((1, 3), (2,))]


def test_more_new_tokens_than_the_profile_takes_go_in_several_calls(build_engine: EngineKit, tiny: TinyModels) -> None:
    model, prompt, new = tiny.hf_model(SMALL), random_tokens(5), random_tokens(11, seed=3)
    _, cache = pop_prefill(model, prompt, TAIL)
    with loaded(directory_of(build_engine, tiny, FORMS[0])) as run, taken_slots(run.engine, 1) as (slot,):
        run.engine.prefill(slot, prompt)
        session: Any = run.engine._session
        found = session.decode(SlotRange(slot, 1), np.array([new]), run.engine._slots.lengths[slot : slot + 1])
        assert relative_error(found[0], decode(model, cache, new).numpy()) < TOLERANCE
        assert [call["input_ids"] for call in run.trt.executed[1:]] == [(1, 8), (1, 3)]


def test_plain_tensorrt_has_no_runtime_config(build_engine: EngineKit, tiny: TinyModels) -> None:
    prompt = random_tokens(9)
    expected, _ = pop_prefill(tiny.hf_model(SMALL), prompt, TAIL)
    with loaded(directory_of(build_engine, tiny, FORMS[0]), rtx=False) as run, taken_slots(run.engine, 1) as (slot,):
        assert relative_error(run.engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE


def test_chunks_of_any_size_give_the_same(build_engine: EngineKit, tiny: TinyModels) -> None:
    prompt = random_tokens(MAX_SEQ_LEN)
    expected, _ = pop_prefill(tiny.hf_model(SMALL), prompt, TAIL)
    with loaded(directory_of(build_engine, tiny, FORMS[0])) as run:
        for size in (1, 7, 15):
            with chunks_of(run.engine, size), taken_slots(run.engine, NUM_SLOTS) as slots:
                assert relative_error(run.engine.prefill(slots[-1], prompt), expected.numpy()) < TOLERANCE
