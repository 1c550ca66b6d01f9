"""The regressions against least squares over samples that are written out one by one."""

import pytest
import torch

from calibration_kit import random_model, random_pieces
from pop_engine.builder.analysis import fit
from pop_engine.builder.export.calibrated_tail import bias_name, weight_name
from pop_engine.configs.errors import EngineError
from pop_engine.configs.prune_plan import PrunePlan

PLAN = PrunePlan(5, 3)
LAYER, SEQUENCE = 3, 49


def test_a_query_has_no_context_just_before_it() -> None:
    """Of 49 tokens, up to 12 before a query are as good as decoded: none for the first, one for the next."""
    context = fit.context_attention(torch.ones(2, SEQUENCE, SEQUENCE).tril())
    for query in range(SEQUENCE):
        last = query - query % 12 - 1
        assert context[0, query].nonzero().flatten().tolist() == list(range(last + 1))


def observed() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """What transformers says of each piece: the first tail layer's normalised input, K and V, attention weights."""
    model = random_model()
    model.set_attn_implementation("eager")
    layers, found = model.model.layers, []
    for piece in random_pieces(12):
        with torch.no_grad():
            ids = torch.tensor([piece.token_ids])
            output = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
            state = layers[2].input_layernorm(output.hidden_states[2][0])
            own = layers[LAYER].input_layernorm(output.hidden_states[LAYER][0])
            key, value = layers[LAYER].self_attn.k_proj(own), layers[LAYER].self_attn.v_proj(own)
        found.append((state.double(), key.double(), value.double(), output.attentions[LAYER][0].double()))
    return found


def least_squares(rows: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
    solution: torch.Tensor = torch.linalg.lstsq(torch.stack(rows), torch.stack(targets), driver="gelsd").solution
    return solution


@pytest.mark.parametrize("num_groups", [2, 1])
def test_tokens_are_weighted_by_the_attention_they_get(monkeypatch: pytest.MonkeyPatch, num_groups: int) -> None:
    """For both KV heads apart, each with the two heads that read it, or for all four heads at once."""
    monkeypatch.setattr(fit, "_MAX_SUMS_BYTES", 1e9 if num_groups == 2 else 1)
    maps = fit.fit_projections(random_model(), PLAN, random_pieces(12), lambda done, total: None, ridge=1e-12)
    for group in range(num_groups):
        rows: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for state, key, value, attention in observed():
            mass = torch.zeros(SEQUENCE, dtype=torch.float64)
            for query in range(SEQUENCE):
                for weights in attention.chunk(num_groups)[group][:, query, : query - query % 12]:
                    mass[: len(weights)] += weights
            mass += 0.03 * mass.mean()
            one = torch.ones(1, dtype=torch.float64)
            rows += [weight.sqrt() * torch.cat([row, one]) for weight, row in zip(mass, state, strict=True)]
            for output, targets in ((key, keys), (value, values)):
                split = output.chunk(num_groups, 1)[group]
                targets += [weight.sqrt() * row for weight, row in zip(mass, split, strict=True)]
        for kind, targets in (("k_proj", keys), ("v_proj", values)):
            name = f"model.layers.{LAYER}.self_attn.{kind}"
            found = torch.cat([maps[weight_name(name)].T, maps[bias_name(name)][None]])
            expected = least_squares(rows, targets).float()
            torch.testing.assert_close(found.chunk(num_groups, 1)[group], expected, rtol=2e-3, atol=2e-3)


def test_a_model_that_hides_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with pytest.raises(EngineError, match="do not return their attention's weights"):
        fit.fit_projections(model, PLAN, random_pieces(1), lambda done, total: None)
