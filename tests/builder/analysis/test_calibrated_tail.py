"""The maps themselves: recovered exactly where an affine map is the truth, in force for context rows alone."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from calibration_kit import fused_model, random_model, random_pieces
from pop_engine.builder.analysis.fit import fit_projections
from pop_engine.builder.analysis.recording import recorded
from pop_engine.builder.export.calibrated_tail import CalibratedTail, bias_name, calibrated_shapes, weight_name
from pop_engine.builder.export.projections import tail_projections
from pop_engine.builder.reference import Reference, pruned_prefill, reference_logits
from pop_engine.configs.errors import UsageError
from pop_engine.configs.prune_plan import PrunePlan
from pop_reference import decode, empty_cache
from pop_reference import pruned_prefill as golden_prefill

PLAN = PrunePlan(5, 3)
TOKENS = [(7 * i * i + 3 * i + 5) % 97 for i in range(23)]


def random_maps(model: nn.Module, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = calibrated_shapes(model, PLAN)  # type: ignore[arg-type]
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def calibrated(model: nn.Module, maps: dict[str, torch.Tensor]) -> Reference:
    parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in maps.items()}
    return Reference(model, PLAN, CalibratedTail(model, PLAN, parameters).context_rows)  # type: ignore[arg-type]


def test_maps_are_recovered_where_the_tail_adds_nothing() -> None:
    """Each tail layer then sees the trunk's own state, and K = W diag(g_l / g_first) x exactly, with no bias."""
    model = random_model(idle_tail=3)
    found = fit_projections(model, PLAN, random_pieces(20), lambda done, total: None, ridge=1e-10)
    first = model.model.layers[2].input_layernorm.weight
    for layer_idx in (3, 4):
        layer = model.model.layers[layer_idx]
        for kind in ("k_proj", "v_proj"):
            name = f"model.layers.{layer_idx}.self_attn.{kind}"
            expected = getattr(layer.self_attn, kind).weight * (layer.input_layernorm.weight / first)
            torch.testing.assert_close(found[weight_name(name)], expected, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(found[bias_name(name)], torch.zeros(16), rtol=0, atol=2e-3)


def test_the_first_tail_layer_is_left_alone() -> None:
    names = calibrated_shapes(random_model(), PLAN)
    assert {int(name.split(".")[2]) for name in names} == {3, 4}


def test_fitted_maps_bring_keys_and_values_closer() -> None:
    model = random_model()
    maps = fit_projections(model, PLAN, random_pieces(40), lambda done, total: None)
    tail, piece = tail_projections(model, PLAN), random_pieces(1, seed=9)[0]
    plain, full = Reference(model, PLAN), Reference(model, PrunePlan(5, 0))
    outputs = []
    for reference in (full, plain, calibrated(model, maps)):
        with recorded(tail) as recording:
            pruned_prefill(reference, piece.token_ids, DynamicCache(config=model.config))
        outputs.append(recording.outputs)
    for layer in tail[1:]:
        for name, _ in layer.named():
            truth, before, after = (output[name] for output in outputs)
            assert (after - truth).square().sum() < 0.9 * (before - truth).square().sum()


def test_calibration_changes_context_rows_and_nothing_else() -> None:
    """The golden: a copy of the model whose tail has the maps as its projections and the first tail layer's norm."""
    model = random_model()
    maps, prune_only = random_maps(model), copy.deepcopy(model)
    for layer_idx in (3, 4):
        layer = prune_only.model.layers[layer_idx]
        layer.input_layernorm = prune_only.model.layers[2].input_layernorm
        for kind in ("k_proj", "v_proj"):
            name = f"model.layers.{layer_idx}.self_attn.{kind}"
            projection = nn.Linear(32, 16)
            projection.weight, projection.bias = (
                nn.Parameter(maps[weight_name(name)]),
                nn.Parameter(maps[bias_name(name)]),
            )
            setattr(layer.self_attn, kind, projection)
    golden_cache = golden_prefill(prune_only, TOKENS[:-1], 3)
    expected = decode(model, golden_cache, [*TOKENS[-1:], 4, 5])
    found = reference_logits(calibrated(model, maps), TOKENS, [4, 5])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    plain = reference_logits(Reference(model, PLAN), TOKENS, [4, 5])
    assert (plain - found).abs().max() > 0.1
    plain_golden = decode(model, golden_prefill(model, TOKENS[:-1], 3), [*TOKENS[-1:], 4, 5])
    torch.testing.assert_close(plain, plain_golden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [1, 4, 22, 23, 60])
def test_a_window_of_the_reference_equals_the_golden(window: int) -> None:
    model = random_model()
    cache = golden_prefill(model, TOKENS[:-window], 3) if TOKENS[:-window] else empty_cache(model)
    expected = decode(model, cache, TOKENS[-window:])[-1]
    found = reference_logits(Reference(model, PLAN), TOKENS, [], window)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "projection"), [("gpt2", "c_attn"), ("phi3", "qkv_proj")])
def test_a_fused_projection_is_refused_by_name(family: str, projection: str) -> None:
    model = fused_model(family)
    layers = model.config.num_hidden_layers
    with pytest.raises(UsageError, match=rf"one fused projection \({projection}\).*build without calibration"):
        calibrated_shapes(model, PrunePlan(layers, 2))


@pytest.mark.parametrize("num_tail_layers", [0, 1])
def test_a_tail_with_nothing_to_calibrate_is_refused(num_tail_layers: int) -> None:
    with pytest.raises(UsageError, match=f"a tail of {num_tail_layers} has nothing to calibrate"):
        calibrated_shapes(random_model(), PrunePlan(5, num_tail_layers))
