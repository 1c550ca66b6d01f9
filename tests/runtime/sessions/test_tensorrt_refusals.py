"""What stops an engine for TensorRT before a plan is touched: each with its one line."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_kit import EngineKit, TinyModels
from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding
from pop_engine.configs.manifest import MANIFEST_NAME, Manifest
from pop_engine.runtime import Engine
from pop_engine.runtime.cli import main as pop_run
from pop_engine.runtime.sessions import device, tensorrt
from pop_engine.runtime.sessions.device_call import small_inputs
from pop_engine.runtime.sessions.tensorrt_module import check_version, load_module
from pop_engine.runtime.sessions.tensorrt_plan import plan_records
from simulated_gpu import SimulatedGpu
from simulated_tensorrt import VERSION, SimulatedTensorRT, simulated_compiler


@pytest.fixture(scope="module")
def directory(build_engine: EngineKit, tiny: TinyModels) -> Path:
    with simulated_compiler():
        return build_engine.directory(
            tiny.checkpoint(), target="tensorrt-rtx", dtype="fp32", tail_layers=2, max_seq_len=64, max_batch_size=4
        )


@contextmanager
def on(gpu: SimulatedGpu, directory: Path) -> Iterator[SimulatedTensorRT]:
    """Within it, engines find this GPU, and TensorRT."""
    trt = SimulatedTensorRT(gpu, directory, plan_records(Manifest.load(directory)), rtx=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "load_driver", lambda: gpu)
        patch.setattr(tensorrt, "load_module", lambda *_, **__: trt)
        yield trt
    assert gpu.is_clean, "a refusal leaves nothing on the GPU"


def test_a_real_engine_stops_at_the_driver(
    build_engine: EngineKit, tiny: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real plans, the real package, the real driver's bindings: what is missing here is the driver."""
    pytest.importorskip("tensorrt_rtx", reason="needs `pip install 'pop-engine[tensorrt-rtx]'`")
    pytest.importorskip("cuda.bindings", reason="needs `pip install 'pop-engine[tensorrt-rtx]'`")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU here")
    built = build_engine.directory(
        tiny.checkpoint(), target="tensorrt-rtx", gpu="sm89", tail_layers=1, max_seq_len=64, max_prefill_len=64
    )
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("hello")
    capsys.readouterr()
    assert pop_run([str(built), str(prompt)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"pop-run: error: {built}: target tensorrt-rtx for sm89: no NVIDIA driver: libcuda.so.1 cannot be loaded; "
        "install the driver, or run the engine on a machine with an NVIDIA GPU\n"
    )


def test_another_gpu_is_refused_before_a_plan_is_read(directory: Path) -> None:
    with on(SimulatedGpu(capability=(12, 0)), directory) as trt:
        trt.may_load = False
        with pytest.raises(
            EngineError,
            match="^prefill.plan: compiled for sm89, and this machine's GPU is Simulated GPU, sm120; build the engine",
        ):
            Engine.load(directory)


def test_no_gpu(directory: Path) -> None:
    with on(SimulatedGpu(count=0), directory), pytest.raises(EngineError, match="for sm89: no NVIDIA GPU: the driver"):
        Engine.load(directory)


def test_too_little_memory_is_seen_before_a_plan_is_read(directory: Path) -> None:
    weights = Manifest.load(directory).weights
    assert weights is not None
    with on(SimulatedGpu(total_bytes=weights.num_bytes + 200_000), directory) as trt:
        trt.may_load = False
        with pytest.raises(EngineError, match=r"GPU 0 \(Simulated GPU\): .* are free, .*; build with --max-batch-size"):
            Engine.load(directory)


def test_memory_that_runs_out_on_the_way_is_given_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have taken it since the estimate."""
    gpu = SimulatedGpu(total_bytes=400_000)
    monkeypatch.setattr(gpu, "cuMemGetInfo", lambda: (0, 1 << 40, 1 << 40))
    with on(gpu, directory), pytest.raises(EngineError, match="cuMemAlloc: the GPU is out of memory; close what else"):
        Engine.load(directory)


def test_a_plan_that_is_not_the_manifest_s(directory: Path) -> None:
    with on(SimulatedGpu(), directory) as trt:
        record = trt._records["decode"]
        contract = replace(record.contract, inputs=record.contract.inputs[1:])
        trt._records["decode"] = replace(record, contract=contract)
        with pytest.raises(EngineError, match="decode.plan: input_ids is not in both plan and manifest; build again"):
            Engine.load(directory)


@pytest.mark.parametrize(
    ("found", "compatible", "is_refused"),
    [(VERSION, False, False), ("0.0.2", False, True), ("0.0.2", True, False), ("1.0.0", True, True)],
)
def test_the_version_that_compiled_the_plans(found: str, compatible: bool, is_refused: bool) -> None:
    if not is_refused:
        check_version("tensorrt", VERSION, found, version_compatible=compatible)
        return
    with pytest.raises(
        EngineError, match=f"compiled with version {VERSION}, and {found} is installed; install {VERSION}"
    ):
        check_version("tensorrt", VERSION, found, version_compatible=compatible)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (ModuleNotFoundError("no", name="tensorrt"), "the package tensorrt is not installed; `pip install 'pop-engine"),
        (OSError("libnvinfer.so.11: cannot open"), "tensorrt cannot load its libraries .*libnvinfer.so.11"),
        (SimpleNamespace(__version__="11.0"), "compiled with version 11.1, and 11.0 is installed"),
    ],
)
def test_a_package_that_is_missing_or_another(monkeypatch: pytest.MonkeyPatch, outcome: Any, message: str) -> None:
    def load(name: str) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(EngineError, match=f"target tensorrt: .*{message}"):
        load_module("tensorrt", "11.1", version_compatible=False)


def test_the_driver_s_bindings_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError("no", name="cuda")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(EngineError, match="the package cuda-bindings is not installed .*`pip install 'cuda-bindings"):
        device.load_driver()


def test_an_engine_without_plans(directory: Path) -> None:
    manifest = Manifest.load(directory, MANIFEST_NAME)
    with pytest.raises(EngineError, match="target tensorrt-rtx: the manifest names no plans; build the engine again"):
        plan_records(replace(manifest, decode=replace(manifest.decode, plan=None)))


def test_an_input_that_no_text_has(directory: Path) -> None:
    contract = Manifest.load(directory).decode.contract
    images = replace(contract, inputs=(*contract.inputs, Binding("image_embeds", (io.BATCH, io.SEQ, 64), "fp32")))
    assert [binding.name for binding in small_inputs(contract)] == [io.INPUT_IDS, io.POSITION_IDS, io.CACHE_LEN]
    with pytest.raises(EngineError, match="input image_embeds: this target takes text alone; build for ort-cpu"):
        small_inputs(images)
