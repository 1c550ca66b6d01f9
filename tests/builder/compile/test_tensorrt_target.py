"""What a person meets: a package that is missing, a GPU that does not exist, an engine that cannot run here."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from engine_kit import EngineKit, TinyModels
from pop_engine.builder.compile import tensorrt
from pop_engine.builder.compile.target import target_of
from pop_engine.configs.build_config import BuildOptions, resolve_build
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.model_dims import ModelDims
from pop_engine.tools.inspect import main as inspect
from pop_engine.tools.integrity import check_integrity

DIMS = ModelDims("llama", 3, 128, 192, 4, 2, 64, 320, 128)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("no", name="tensorrt_rtx"), "the package tensorrt_rtx is not installed; `pip install"),
        (OSError("libnvinfer.so.11: cannot open"), "its libraries cannot be loaded .*libnvinfer.so.11"),
        (RuntimeError("a stub"), "its libraries cannot be loaded .a stub."),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def refuse(name: str) -> Any:
        raise error

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(UsageError, match=f"--target tensorrt-rtx: .*{message}"):
        target_of("tensorrt-rtx").require()


def test_tensorrt_needs_a_gpu_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "load_module", lambda name: None)
    monkeypatch.setattr(tensorrt, "local_gpu", lambda: None)
    with pytest.raises(UsageError, match="compiles for the GPU of this machine, and there is none"):
        target_of("tensorrt").require()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BuildOptions(target="tensorrt-rtx", gpu="sm90"), "--gpu sm90: TensorRT-RTX compiles for sm75, .*sm121"),
        (BuildOptions(target="tensorrt-rtx", gpu="sm75"), "--gpu sm75: has no bf16; add --dtype fp16"),
        (BuildOptions(target="tensorrt", gpu="sm89"), "--gpu sm89: only target tensorrt-rtx"),
        (BuildOptions(gpu="sm89"), "--gpu sm89: only target tensorrt-rtx"),
        (BuildOptions(target="tensorrt-rtx", dtype="fp32"), "--dtype fp32: target tensorrt-rtx runs bf16, fp16"),
        (
            BuildOptions(engine_layout="single"),
            "--engine-layout single: only targets tensorrt and tensorrt-rtx have plans",
        ),
        (BuildOptions(target="tensorrt-rtx", engine_layout="single", boundary="two-step"), "leave one of them out"),
        (
            BuildOptions(target="tensorrt-rtx", timing_cache="x"),
            "--timing-cache x: target tensorrt-rtx times no kernels",
        ),
        (
            BuildOptions(target="tensorrt-rtx", optimization_level=3),
            "--optimization-level 3: target tensorrt-rtx times",
        ),
        (BuildOptions(target="tensorrt", optimization_level=6), "--optimization-level 6: TensorRT takes 0 to 5"),
    ],
)
def test_what_cannot_be_compiled_is_refused(options: BuildOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_build(options, DIMS)


def test_tensorrt_takes_a_level_and_a_cache() -> None:
    options = BuildOptions(target="tensorrt", optimization_level=4, timing_cache="t.cache")
    plans = resolve_build(options, DIMS).plans
    assert (plans.optimization_level, plans.timing_cache, plans.engine_layout) == (4, Path("t.cache"), "split")


@pytest.mark.usefixtures("rtx")
def test_an_engine_is_built_recorded_and_not_run(
    build_engine: EngineKit, tiny: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = build_engine.directory(
        tiny.checkpoint(), target="tensorrt-rtx", gpu="sm89", tail_layers=1, max_seq_len=64
    )
    manifest = Manifest.load(directory)

    assert (manifest.target.name, manifest.target.gpu, manifest.dtype) == ("tensorrt-rtx", "sm89", "bf16")
    assert manifest.verification.status == "skipped"
    assert "run on a GPU" in manifest.verification.reason
    assert {"prefill.plan", "decode.plan"} <= {file.path for file in manifest.files}
    assert check_integrity(directory, manifest).passed
    assert weight_names(directory) == {binding.name for binding in manifest.decode.contract.weights}

    assert inspect([str(directory)]) == 0
    report = capsys.readouterr().out
    for line in (
        "prefill.plan: for sm89",
        "model.layers.0.mlp.up_proj.weight … model.layers.3.mlp.up_proj.weight",
        "lower-right",
        "written in place",
        "tuned for",
        "none inside",
    ):
        assert line in report


def weight_names(directory: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(directory / "weights" / "model.safetensors", framework="np") as file:
        return set(file.keys())
