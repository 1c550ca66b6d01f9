"""ShortGPT, SliceGPT and Wanda by their papers, against hand computation, cut weights and brute force."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ablation_kit import ANSWER, MODELS, PROMPT, answer_rows, conv1d_model, text
from calibration_kit import random_model
from pop_engine.configs.errors import UsageError
from pop_engine.tools.ablations.block_influence import block_influence, least_influential
from pop_engine.tools.ablations.predict import plain_prediction
from pop_engine.tools.ablations.slicegpt import principal_axes, sliced
from pop_engine.tools.ablations.wanda import least_scored, wanda_pruned

pytestmark = pytest.mark.usefixtures("one_torch_thread")
models = pytest.mark.parametrize("kind", MODELS)


@models
def test_block_influence_by_hand(kind: str) -> None:
    """From transformers' own list of hidden states; its last has been through the final norm, so that is left out."""
    model, tokens = MODELS[kind](), text()
    found = block_influence(model, tokens)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for layer_idx in range(len(found) - 1):
        before, after = (state.double().flatten(0, 1).tolist() for state in states[layer_idx : layer_idx + 2])
        cosines = [
            sum(a * b for a, b in zip(x, y, strict=True)) / (sum(a * a for a in x) * sum(b * b for b in y)) ** 0.5
            for x, y in zip(before, after, strict=True)
        ]
        assert found[layer_idx] == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-6)


def test_a_layer_that_adds_nothing_has_no_influence_and_goes_first() -> None:
    found = block_influence(random_model(idle_tail=2), text())
    assert found[3:] == pytest.approx([0, 0], abs=1e-12)
    assert least_influential(found, 2) == (3, 4)
    assert least_influential([0.3, 0.1, 0.2, 0.05], 2) == (1, 3)


@models
def test_nothing_is_sliced_away_at_0(kind: str) -> None:
    model = MODELS[kind]()
    expected = answer_rows(model, PROMPT, ANSWER)
    with sliced(model, text(), 0) as axes, torch.no_grad():
        torch.testing.assert_close(plain_prediction(model)(PROMPT, ANSWER), expected, rtol=1e-4, atol=1e-4)
    assert len(axes) == 1 + 2 * len(model.model.layers)
    for matrix in axes:
        torch.testing.assert_close(matrix.T @ matrix, torch.eye(32), rtol=0, atol=1e-5)
    assert torch.equal(answer_rows(model, PROMPT, ANSWER), expected)


def test_layer_norm_takes_its_mean_away_first() -> None:
    model = conv1d_model()
    expected = answer_rows(model, PROMPT, ANSWER)
    with sliced(model, text(), 0), torch.no_grad():
        torch.testing.assert_close(plain_prediction(model)(PROMPT, ANSWER), expected, rtol=1e-4, atol=1e-3)


def test_axes_are_singular_vectors_of_what_the_norm_gives_out() -> None:
    states = torch.randn(4, 30, 16, dtype=torch.float64) * torch.linspace(0.1, 2, 16, dtype=torch.float64)
    rows = states.reshape(-1, 16)
    normed = rows / rows.square().mean(1, keepdim=True).sqrt()
    vectors = torch.linalg.svd(normed, full_matrices=False)[2][:5]
    found = principal_axes(states, 5)
    torch.testing.assert_close(found @ found.T, vectors.T @ vectors)


class CutLlama:
    """SliceGPT as its paper writes it: scales folded, weights turned and cut, adapters between the blocks' axes.

    A Llama's weights only; between them the state has k numbers. `given` collects what the axes are found from.
    """

    def __init__(self, model: Any, axes: list[Tensor]) -> None:
        self.model, self.axes = model, axes
        self.width = model.config.hidden_size
        self.given: list[Tensor] = []

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        decoder = self.model.model
        embedded = decoder.embed_tokens(token_ids)
        self.given = [embedded]
        state = embedded @ self.axes[0]
        rotary = decoder.rotary_emb(embedded, torch.arange(token_ids.shape[1])[None])
        for layer_idx, layer in enumerate(decoder.layers):
            first, second, third = self.axes[2 * layer_idx : 2 * layer_idx + 3]
            attention = self._cut(layer.self_attn, layer.input_layernorm, first, second)
            added = self._attend(attention, self._norm(state), rotary)
            state = self._add(state, first, added, second)
            mlp = self._cut(layer.mlp, layer.post_attention_layernorm, second, third)
            state = self._add(state, second, mlp(self._norm(state)), third)
        head = self.model.lm_head.weight * decoder.norm.weight @ self.axes[-1]
        logits: Tensor = self._norm(state) @ head.T
        return logits

    def _norm(self, state: Tensor) -> Tensor:
        """RMSNorm without scale, by the width of the whole model."""
        normed: Tensor = state * self.width**0.5 / state.norm(dim=-1, keepdim=True)
        return normed

    def _add(self, state: Tensor, before: Tensor, added: Tensor, after: Tensor) -> Tensor:
        # What the axes at `after` are found from, in the model's own axes: `added` is in those, not yet cut.
        self.given.append(state @ before.T + added)
        return state @ (before.T @ after) + added @ after

    def _cut(self, block: Any, norm: Any, before: Tensor, after: Tensor) -> Any:
        cut = copy.deepcopy(block)
        for name, linear in cut.named_modules():
            if isinstance(linear, nn.Linear) and name not in ("o_proj", "down_proj"):
                linear.weight = nn.Parameter(linear.weight * norm.weight @ before)
        return cut

    def _attend(self, attention: Any, normed: Tensor, rotary: Any) -> Tensor:
        length = normed.shape[1]
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
        found: Tensor = attention(normed, position_embeddings=rotary, attention_mask=causal)[0]
        return found


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_slicing_is_the_paper_s_cut_model(share: float) -> None:
    model, tokens = random_model(), text()
    with sliced(model, tokens, share) as axes, torch.no_grad():
        found = model(torch.tensor([PROMPT + ANSWER]), use_cache=False).logits
    assert {tuple(matrix.shape) for matrix in axes} == {(32, int(32 * (1 - share)))}
    cut = CutLlama(model, axes)
    expected = cut.logits(torch.tensor([PROMPT + ANSWER]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    cut.logits(tokens)
    for given, matrix in zip(cut.given, axes, strict=True):
        rows = given.flatten(0, 1)
        normed = rows / rows.norm(dim=1, keepdim=True)
        vectors = torch.linalg.svd(normed.double(), full_matrices=False)[2][: matrix.shape[1]].float()
        torch.testing.assert_close(matrix @ matrix.T, vectors.T @ vectors, rtol=0, atol=1e-3)


def test_wanda_s_choice_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(7, 20, generator=generator), torch.randn(50, 20, generator=generator)
    found = least_scored(weight, inputs.norm(dim=0), 0.3)
    for row, chosen in zip(weight.tolist(), found.tolist(), strict=True):
        scores = [abs(w) * sum(x[j] ** 2 for x in inputs.tolist()) ** 0.5 for j, w in enumerate(row)]
        assert [j for j, is_chosen in enumerate(chosen) if is_chosen] == sorted(
            sorted(range(20), key=lambda j: scores[j])[:6]
        )


@pytest.mark.parametrize("make", [*MODELS.values(), conv1d_model], ids=[*MODELS, "gpt2"])
def test_wanda_prunes_every_row_and_layer_after_layer(make: Any) -> None:
    """A layer's inputs are those of a model whose layers before it are pruned: read off the pruned model itself."""
    model, tokens = make(), text()
    original = copy.deepcopy(model.state_dict())
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    with wanda_pruned(model, tokens, 0.25):
        pruned = copy.deepcopy(model.state_dict())
        inputs = first_inputs(model, blocks, tokens)
    names = {id(module): name for name, module in model.named_modules()}
    changed = set()
    for module, given in inputs.items():
        name = f"{names[id(module)]}.weight"
        changed.add(name)
        before, after = (
            state[name] if isinstance(module, nn.Linear) else state[name].T for state in (original, pruned)
        )
        assert (after == 0).sum(1).tolist() == [before.shape[1] // 4] * before.shape[0]
        assert torch.equal(after != 0, ~least_scored(before, given.norm(dim=0), 0.25))
        assert torch.equal(after[after != 0], before[after != 0])
    others = {name for name in original if not torch.equal(original[name], pruned[name])} - changed
    # Inside a layer later matrices read what the unpruned ones before them gave, which is gone: only their rows are
    # counted.
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in others} <= {
        "o_proj", "gate_proj", "up_proj", "down_proj", "c_proj", "c_fc"
    }  # fmt: skip
    for name in others:
        rows = pruned[name] if "c_" not in name else pruned[name].T
        assert (rows == 0).sum(1).tolist() == [rows.shape[1] // 4] * rows.shape[0]
    assert all(torch.equal(tensor, original[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def first_inputs(model: Any, blocks: Any, tokens: Tensor) -> dict[nn.Module, Tensor]:
    """What each layer's first matrices read: they are not behind any other matrix of their own layer."""
    found: dict[nn.Module, Tensor] = {}
    handles = []
    for block in blocks:
        attention = block.attn if hasattr(block, "attn") else block.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "c_attn"):
            if hasattr(attention, name):
                handles.append(
                    getattr(attention, name).register_forward_pre_hook(
                        lambda module, args: found.update({module: args[0].flatten(0, 1)})
                    )
                )
    model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def test_a_model_without_matrices_is_refused() -> None:
    model = random_model()
    model.model.layers = nn.ModuleList(nn.Identity() for _ in range(5))
    with pytest.raises(UsageError, match="wanda: the layers of LlamaForCausalLM hold no linear modules"):
        wanda_pruned(model, text()).__enter__()
