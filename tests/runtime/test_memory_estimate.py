"""What an engine will take, in real numbers, and the limit that a message names when it is too much."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine_kit import SMALL, TinyModels
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import CacheShape, KVShape
from pop_engine.configs.manifest import Limits, Manifest, WeightsRecord
from pop_engine.configs.model_dims import ModelDims
from pop_engine.runtime import Engine, memory_estimate
from pop_engine.runtime.memory_estimate import MemoryEstimate, device_estimate, free_host_bytes, host_estimate

# Llama-3.1-8B in bf16: 32 layers of 8 heads of 128, so 128 KiB a token.
DIMS = ModelDims("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
WEIGHTS_BYTES = 16_060_522_496
LIMITS = Limits(4096, 8, 512)
SLOT_BYTES = 4096 * 131_072


@pytest.fixture(scope="module")
def manifest(tiny: TinyModels) -> Manifest:
    """A real manifest with the numbers of Llama-3.1-8B."""
    found = Manifest.load(tiny.directory((SMALL, 1), "one-pass"))
    weights = WeightsRecord("link", "weights", "bf16", WEIGHTS_BYTES, ())
    cache = CacheShape((KVShape(8, 128),) * 32, 4096, "bf16")
    return replace(found, dims=DIMS, weights=weights, cache=cache, limits=LIMITS)


def test_llama_8b_on_a_gpu(manifest: Manifest) -> None:
    estimate = device_estimate(manifest, num_rows=512)
    assert estimate.weights_bytes == WEIGHTS_BYTES
    assert estimate.slot_bytes == SLOT_BYTES
    assert estimate.cache_bytes == 8 * SLOT_BYTES == 4_294_967_296
    # One layer's worth of 512 rows: well below a hundredth of the weights.
    assert 10e6 < estimate.activation_bytes < 100e6
    estimate.check(24_000_000_000, "GPU 0")


def test_on_the_cpu_one_slot_counts_and_the_second_session_s_weights(manifest: Manifest) -> None:
    one_pass = replace(manifest, target=replace(manifest.target, decode_with="prefill"))
    two_step = replace(manifest, target=replace(manifest.target, decode_with="decode"))
    assert host_estimate(one_pass).cache_bytes == SLOT_BYTES
    assert host_estimate(one_pass).weights_bytes == WEIGHTS_BYTES
    assert host_estimate(two_step).weights_bytes == 2 * WEIGHTS_BYTES


@pytest.mark.parametrize(
    ("free_bytes", "advice"),
    [
        # Room for five slots beside weights and activations, for half a slot, for weights alone, and for nothing.
        (1000 + 50 + 5 * 400 + 399, "build with --max-batch-size 5"),
        (1000 + 50 + 200, "build with --max-batch-size 1 and --max-seq-len 2048"),
        (1000 + 40, "build with a --max-prefill-len below 512 and a lower --max-seq-len"),
        (900, "free some, or use more: the weights alone do not fit"),
    ],
)
def test_the_limit_that_would_be_enough_is_named(free_bytes: int, advice: str) -> None:
    estimate = MemoryEstimate(1000, 400, 8, 50, LIMITS)
    with pytest.raises(EngineError, match=f"^GPU 0: .* are free, but the engine takes .*; {advice}$"):
        estimate.check(free_bytes, "GPU 0")


def test_what_it_advises_fits() -> None:
    estimate = MemoryEstimate(1000, 400, 8, 50, LIMITS)
    replace(estimate, num_slots=5).check(1000 + 50 + 5 * 400, "GPU 0")
    estimate.check(estimate.total_bytes, "GPU 0")
    with pytest.raises(EngineError):
        estimate.check(estimate.total_bytes - 1, "GPU 0")


def test_available_memory_is_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   512 kB\n")
    monkeypatch.setattr(memory_estimate, "_MEMINFO", meminfo)
    assert free_host_bytes() == 512 * 1024
    monkeypatch.setattr(memory_estimate, "_MEMINFO", tmp_path / "none")
    assert free_host_bytes() is None


def test_an_engine_that_does_not_fit_is_not_loaded(
    tiny: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 10 kB\n")
    monkeypatch.setattr(memory_estimate, "_MEMINFO", meminfo)
    with pytest.raises(EngineError, match="^memory: 0.00 GB are free, .*the weights alone do not fit"):
        Engine.load(tiny.directory((SMALL, 1), "one-pass"))
