"""Presets without weights, from their shipped config alone: all are planned in CI, and built by night."""

from pathlib import Path

import pytest

from engine_kit import EngineKit
from pop_engine.builder.checkpoint.preset import list_presets, load_preset
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.export.model import model_dims, parameter_shapes
from pop_engine.configs.build_config import BuildConfig, resolve_build
from pop_engine.configs.manifest import Manifest


def layers_of(name: str) -> tuple[int, int]:
    """Layers and tail layers, as the file says."""
    preset = load_preset(name)
    text = preset.hf_config.get("text_config", preset.hf_config)
    assert preset.options.tail_layers is not None
    return text["num_hidden_layers"], preset.options.tail_layers


@pytest.mark.parametrize("name", list_presets())
def test_preset_is_planned(name: str) -> None:
    checkpoint = open_checkpoint(BuildConfig(name, Path("out"), with_weights=False))
    plan = resolve_build(checkpoint.options, model_dims(checkpoint.hf_config)).plan
    assert (plan.num_hidden_layers, plan.num_tail_layers) == layers_of(name)
    assert parameter_shapes(checkpoint.hf_config)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list_presets())
def test_preset_builds(name: str, build_engine: EngineKit) -> None:
    directory = build_engine.directory(name, verify=True, with_weights=False)
    manifest = Manifest.load(directory)
    num_layers, num_tail_layers = layers_of(name)
    assert manifest.weights is None
    assert (manifest.plan.num_hidden_layers, manifest.plan.num_tail_layers) == (num_layers, num_tail_layers)
    # A tail layer attends too, for the boundary row.
    for graph in (manifest.prefill, manifest.decode):
        assert (directory / graph.file).stat().st_size > 0
        assert graph.operators["GroupQueryAttention"] == num_layers
