"""Plans on disk: back as they were, and every file that is no plan of this model."""

import json
from pathlib import Path

import pytest

from pop_engine.configs.build_config import BuildOptions, resolve_build
from pop_engine.configs.errors import UsageError
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import PrunePlanFile, load_prune_plan

DIMS = ModelDims("llama", 6, 32, 48, 4, 2, 8, 96, 128)


def test_a_build_takes_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "plan.json"
    PrunePlanFile(6, (3, 4, 5), "knee").save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]
    assert resolve_build(BuildOptions(prune_plan=str(path)), DIMS).plan == PrunePlan(6, 3)


def test_a_plan_by_hand_needs_two_fields(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"num_hidden_layers": 6, "pruned_layers": []}')
    assert load_prune_plan(path, 6) == PrunePlan(6, 0)


def test_a_flag_hides_the_plan_of_a_file_and_two_flags_contradict() -> None:
    merged = BuildOptions(tail_layers=2).over(BuildOptions(prune_plan="plan.json"))
    assert (merged.tail_layers, merged.prune_plan) == (2, None)
    merged = BuildOptions(prune_plan="plan.json").over(BuildOptions(prune_ratio=0.5))
    assert (merged.prune_ratio, merged.prune_plan) == (None, "plan.json")
    with pytest.raises(UsageError, match="--tail-layers and --prune-plan: both say how long the tail is"):
        BuildOptions(tail_layers=2, prune_plan="plan.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not a prune plan"),
        ({"num_hidden_layers": 6}, "not a prune plan .*pruned_layers"),
        ({"num_hidden_layers": 6, "pruned_layers": ["5"]}, "not a prune plan"),
        ({"num_hidden_layers": 6, "pruned_layers": [5], "format_version": 2}, "format version 2, expected 1"),
        ({"num_hidden_layers": 8, "pruned_layers": [7]}, "made for 8 layers, and the model has 6"),
        ({"num_hidden_layers": 6, "pruned_layers": [3, 5]}, "pruned_layers 3, 5: expected the last layers without"),
        ({"num_hidden_layers": 6, "pruned_layers": [0, 1]}, "pruned_layers 0, 1: expected the last layers"),
        ({"num_hidden_layers": 6, "pruned_layers": [5, 5]}, "pruned_layers 5, 5: expected the last layers"),
        ({"num_hidden_layers": 6, "pruned_layers": [5, 6]}, "pruned_layers 5, 6: .* up to 5"),
        ({"num_hidden_layers": 6, "pruned_layers": [0, 1, 2, 3, 4, 5]}, "prunes 6 of 6 layers; the first one has to"),
    ],
)
def test_a_file_that_is_no_plan_of_this_model(tmp_path: Path, content: object, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match=rf"--prune-plan {path}: {message}"):
        load_prune_plan(path, 6)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"--prune-plan gone\.json: cannot be read .*make one with pop-analyze"):
        load_prune_plan(Path("gone.json"), 6)
