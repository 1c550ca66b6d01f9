"""From a calibration on disk to an engine: the numbers, the weights modes, and what is refused."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine_kit import (
    BOUNDARIES,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    SMALL,
    EngineKit,
    TinyModels,
    cached,
    chunks_of,
    load_hf_model,
    random_tokens,
    relative_error,
    save_tiny_checkpoint,
    stacked,
    taken_slots,
)
from pop_engine.builder.analysis.calibrate import CalibrationOptions, calibrate
from pop_engine.builder.analysis.calibration import Calibration, describe_model, load_calibration
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.export.calibrated_tail import bias_name, weight_name
from pop_engine.builder.export.model import model_dims
from pop_engine.builder.progress import BuildProgress
from pop_engine.configs.build_config import BuildConfig
from pop_engine.configs.calibration import CalibrationRecord
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.io_contract import Boundary
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.runtime import Engine
from pop_reference import decode, pruned_prefill

TAIL = SMALL - 1
TOLERANCE = 1e-4
RECORD = CalibrationRecord("random", "", 0, 0, 0.0, 0, (), 0.0, 0.0, None, None)
boundaries = pytest.mark.parametrize("boundary", BOUNDARIES)


def random_calibration(checkpoint: Path, num_tail_layers: int = TAIL) -> Calibration:
    """Maps far from the model's own projections: an engine that ignored them would be far off."""
    opened = open_checkpoint(BuildConfig(str(checkpoint), Path("unused")))
    plan = PrunePlan(SMALL, num_tail_layers)
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for layer_idx in plan.tail[1:]:
        for kind in ("k_proj", "v_proj"):
            name = f"model.layers.{layer_idx}.self_attn.{kind}"
            tensors[weight_name(name)] = torch.randn(32, 64, generator=generator) * 0.2
            tensors[bias_name(name)] = torch.randn(32, generator=generator)
    return Calibration(describe_model(opened, model_dims(opened.hf_config), plan), RECORD, tensors)


@pytest.fixture(scope="module")
def calibration(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("calibration")
    random_calibration(tiny_checkpoint).save(directory)
    return directory


@pytest.fixture(scope="module")
def golden(tiny: TinyModels, calibration: Path) -> tuple[Any, Any]:
    """The model, and a copy that prunes as a calibrated engine must: its tail has the maps for projections, after
    the first tail layer's norm."""
    model, maps = tiny.hf_model(), load_calibration(calibration).tensors
    pruner = copy.deepcopy(model)
    first, *others = pruner.model.layers[SMALL - TAIL :]
    for layer_idx, layer in enumerate(others, start=SMALL - TAIL + 1):
        layer.input_layernorm = first.input_layernorm
        for kind in ("k_proj", "v_proj"):
            name = f"model.layers.{layer_idx}.self_attn.{kind}"
            projection = nn.Linear(64, 32)
            projection.weight = nn.Parameter(maps[weight_name(name)])
            projection.bias = nn.Parameter(maps[bias_name(name)])
            setattr(layer.self_attn, kind, projection)
    return model, pruner


def options(boundary: Boundary) -> dict[str, Any]:
    return {"tail_layers": TAIL, "boundary": boundary, "max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS}


@contextmanager
def window_of(engine: Engine, boundary_window: int) -> Iterator[None]:
    manifest = engine.manifest
    engine.manifest = dataclasses.replace(manifest, boundary_window=boundary_window)
    try:
        yield
    finally:
        engine.manifest = manifest


@boundaries
@pytest.mark.parametrize("window", [1, 6, 40])
@pytest.mark.parametrize("chunk", [5, 29])
def test_a_calibrated_engine_equals_the_golden(
    build_engine: EngineKit,
    tiny_checkpoint: Path,
    calibration: Path,
    golden: tuple[Any, Any],
    boundary: Boundary,
    window: int,
    chunk: int,
) -> None:
    engine = build_engine(tiny_checkpoint, calibration=calibration, **options(boundary))
    model, pruner = golden
    prompt = random_tokens(29)
    cache = pruned_prefill(pruner, prompt[:-window], TAIL)
    expected = decode(model, cache, prompt[-window:])[-1]
    with taken_slots(engine, 2) as (_, slot), window_of(engine, window), chunks_of(engine, chunk):
        assert relative_error(engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE
        found = engine.decode_step([slot], [3])[0]
        assert relative_error(found, decode(model, cache, [3])[-1].numpy()) < TOLERANCE


@boundaries
@pytest.mark.parametrize("window", [1, 2, 5, 6, 12, 23, 40])
@pytest.mark.parametrize("chunk", [5, 6, 48])
def test_a_window_equals_the_golden_however_it_is_cut(
    tiny: TinyModels, boundary: Boundary, window: int, chunk: int
) -> None:
    engine, model, prompt = tiny.engine((SMALL, TAIL), boundary), tiny.hf_model(), random_tokens(23)
    cache = pruned_prefill(model, prompt[:-window], TAIL)
    expected = decode(model, cache, prompt[-window:])[-1]
    with taken_slots(engine, 1) as (slot,), window_of(engine, window), chunks_of(engine, chunk):
        assert relative_error(engine.prefill(slot, prompt), expected.numpy()) < TOLERANCE
        assert relative_error(cached(engine, slot), stacked(cache)) < TOLERANCE


def test_the_golden_sees_another_window(tiny: TinyModels) -> None:
    engine, model, prompt = tiny.engine((SMALL, TAIL), "one-pass"), tiny.hf_model(), random_tokens(23)
    other = decode(model, pruned_prefill(model, prompt[:-5], TAIL), prompt[-5:])[-1]
    with taken_slots(engine, 1) as (slot,), window_of(engine, 6):
        assert relative_error(engine.prefill(slot, prompt), other.numpy()) > 10 * TOLERANCE


@pytest.mark.parametrize("mode", ["link", "reference"])
def test_the_checkpoint_stays_shared_and_the_maps_are_the_engines_own(
    build_engine: EngineKit, tiny_checkpoint: Path, calibration: Path, mode: str
) -> None:
    shared = build_engine.directory(tiny_checkpoint, calibration=calibration, weights=mode, **options("one-pass"))
    copied = build_engine(tiny_checkpoint, calibration=calibration, weights="copy", **options("one-pass"))
    assert (shared / "weights" / CALIBRATED_WEIGHTS).stat().st_nlink == 1
    linked = shared / "weights" / "model.safetensors"
    assert linked.exists() == (mode == "link")
    with Engine.load(shared) as engine, taken_slots(engine, 1) as (slot,), taken_slots(copied, 1) as (other,):
        assert engine.manifest.weights is not None
        assert engine.manifest.weights.num_bytes == copied.manifest.weights.num_bytes  # type: ignore[union-attr]
        assert len(engine.manifest.weights.files) == 2
        prompt = random_tokens(17)
        assert (engine.prefill(slot, prompt) == copied.prefill(other, prompt)).all()


def test_calibration_adds_biases_and_no_arithmetic_of_another_kind(
    build_engine: EngineKit, tiny: TinyModels, tiny_checkpoint: Path, calibration: Path
) -> None:
    plain = tiny.engine((SMALL, TAIL), "one-pass").manifest.prefill.operators
    calibrated = build_engine(tiny_checkpoint, calibration=calibration, **options("one-pass"))
    operators = calibrated.manifest.prefill.operators
    # The first tail layer keeps its own K and V, which have no bias, so they are not of the others' two products.
    assert operators["FusedMatMul"] == plain["FusedMatMul"] + 2
    assert operators["Add"] == plain["Add"] + 2
    # One norm serves all context rows; without calibration one for K and one for V.
    assert operators["RMSNormalization"] == plain["RMSNormalization"] - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail_layers": 2}, "made for a tail of 3 layers, and the engine's has 2; give --tail-layers 3"),
        ({"tail_layers": 0}, "made for a tail of 3 layers, and the engine's has 0"),
    ],
)
def test_another_tail_is_refused(
    build_engine: EngineKit, tiny_checkpoint: Path, calibration: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build_engine.directory(tiny_checkpoint, calibration=calibration, **changes)


def test_another_model_is_refused(
    build_engine: EngineKit, tiny: TinyModels, tiny_checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a model of other dimensions"):
        build_engine.directory(tiny.checkpoint(12), calibration=calibration, tail_layers=TAIL)
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    model = load_hf_model(other)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(other)
    with pytest.raises(UsageError, match="whose weights are not those of other"):
        build_engine.directory(other, calibration=calibration, tail_layers=TAIL)


def test_a_damaged_calibration_is_refused(calibration: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no calibration\.json; make one with `pop-calibrate"):
        load_calibration(tmp_path)
    damaged = shutil.copytree(calibration, tmp_path / "damaged")
    tensors = damaged / "calibration.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(EngineError, match="changed since it was written"):
        load_calibration(damaged)
    entries = json.loads((damaged / "calibration.json").read_text())
    entries["format_version"] = 99
    (damaged / "calibration.json").write_text(json.dumps(entries))
    with pytest.raises(EngineError, match="format version 99"):
        load_calibration(damaged)


def test_a_calibration_on_the_models_own_text_passes_and_is_recorded(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model", SMALL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0}))
    checkpoint = open_checkpoint(BuildConfig(str(folder), Path("unused")))
    wanted = CalibrationOptions("self", num_tokens=3000, context_len=32, num_held_out=12)
    found = calibrate(checkpoint, PrunePlan(SMALL, TAIL), wanted, BuildProgress(verbose=False))
    assert found.record.data == "self"
    assert found.record.num_tokens >= 2000
    assert found.record.num_held_out == 12
    assert found.record.nll_calibrated < found.record.nll_plain
    for gain in found.record.layers:
        assert gain.key.calibrated < gain.key.plain
        assert gain.value.calibrated < gain.value.plain
    found.save(tmp_path / "calibration")
    loaded = load_calibration(tmp_path / "calibration")
    assert (loaded.model, loaded.record) == (found.model, found.record)
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in found.tensors.items())
