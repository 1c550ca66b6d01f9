"""Gates in every family: 1 changes nothing, 0 removes a layer, and what no gate can stand for is refused by name."""

from typing import Any

import pytest
import torch

from families.family_table import WORKING, Family
from gate_kit import VOCAB_SIZE, gates_without, hand_gated_logits, scaled_model
from nightly import nightly_unless
from pop_engine.builder.analysis.gates import check_gates, gated
from pop_engine.builder.export.model import decoder_layers, make_model
from pop_engine.configs.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# One of every form of block; the others are nightly.
IN_CI = (
    "llama", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "granite", "cohere", "stablelm", "gpt_neox", "gpt2",
    "opt", "exaone4", "glm4", "mixtral", "gpt_oss",
)  # fmt: skip
TOKENS = torch.tensor([[(7 * i * i + 3 * i + 5) % 90 + 3 for i in range(12)]])


def tiny_model(family: Family) -> Any:
    torch.manual_seed(0)
    return make_model(family.config(), dtype=torch.float32).eval()


@torch.no_grad()
def logits_with(model: Any, gates: torch.Tensor, prefill_len: int) -> torch.Tensor:
    with gated(model, gates, prefill_len):
        logits: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return logits


@pytest.mark.parametrize(
    "family",
    [nightly_unless(f.name in IN_CI, f, name=f.name) for f in WORKING],
)
def test_gates_of_a_family(family: Family) -> None:
    """Removing layers one by one must end at the embeddings: what the model says of them with no layer left."""
    model = tiny_model(family)
    check_gates(model)
    layers = decoder_layers(model)
    ones = torch.ones(len(layers), 2)
    with torch.no_grad():
        plain = model(input_ids=TOKENS, use_cache=False).logits
    assert torch.equal(logits_with(model, ones, 5), plain)
    found = logits_with(model, torch.zeros_like(ones), 5)
    assert not torch.allclose(found, plain)
    for layer in layers:
        layer.register_forward_hook(_skip, with_kwargs=True)
    with torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS, use_cache=False).logits, found)


def _skip(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    given = args[0] if args else kwargs["hidden_states"]
    return (given, *output[1:]) if isinstance(output, tuple) else given


def test_gates_multiply_both_branches_of_their_own_rows() -> None:
    model = scaled_model([1.0] * 4)
    gates = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    with torch.no_grad():
        expected = hand_gated_logits(model, TOKENS % VOCAB_SIZE, [(gate[0], gate[1]) for gate in gates], 8)
    torch.testing.assert_close(logits_with(model, gates, 7), expected, rtol=1e-9, atol=1e-9)


def test_the_model_is_left_as_it_was() -> None:
    model = scaled_model([1.0] * 3)
    expected = hand_gated_logits(model, TOKENS, gates_without(3, [], 0), 5)
    logits_with(model, torch.zeros(3, 2, dtype=torch.float64), 5)
    torch.testing.assert_close(model(input_ids=TOKENS, use_cache=False).logits, expected, rtol=1e-9, atol=1e-9)


def test_norms_on_the_residual_stream_are_refused() -> None:
    family = next(family for family in WORKING if family.name == "opt")
    model = tiny_model(Family("opt", "norm after the sum", {**family.options, "do_layer_norm_before": False}))
    with pytest.raises(UsageError, match="OPTForCausalLM: layer 0 does more than add.*--tail-layers"):
        check_gates(model)


def test_a_scaled_residual_stream_is_refused() -> None:
    family = next(family for family in WORKING if family.name == "gemma4_text")
    model = tiny_model(Family("gemma4_text", "scale", {**family.options, "vocab_size_per_layer_input": 96}))
    layer: Any = decoder_layers(model)[1]
    layer.layer_scalar.fill_(0.5)
    with pytest.raises(UsageError, match="layer 1 does more than add to what passes it"):
        check_gates(model)
