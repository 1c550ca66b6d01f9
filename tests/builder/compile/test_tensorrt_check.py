"""Each thing that TensorRT's parser loses, or could, fails the build: taken away one at a time."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pop_engine.builder.compile import tensorrt_network
from pop_engine.builder.compile.tensorrt_check import check_network
from pop_engine.builder.compile.tensorrt_network import Network, make_network
from pop_engine.builder.compile.tensorrt_plan import compile_plan
from pop_engine.builder.passes.expose_lengths import ExpectedAttention
from pop_engine.configs.errors import EngineError
from tensorrt_kit import Case, LoweredGraph, LoweredGraphs

# A window in the first and the last layer, none in the second; both of these are tail layers.
CASE = Case("gemma3", "prefill", num_tail_layers=2)
Break = Callable[[Network], None]


@pytest.fixture(scope="module")
def graph(lowered: LoweredGraphs) -> LoweredGraph:
    return lowered(CASE)


def attention(network: Network, layer_idx: int) -> Any:
    return next(found for found in network.attentions() if found.name == f"attention.{layer_idx}")


def update(network: Network, output: str) -> Any:
    return next(found for found in network.cache_updates() if found.get_output(0).name == output)


def tensor(network: Network, name: str) -> Any:
    return next(found for found in network.inputs() if found.name == name)


def no_lengths(network: Network) -> None:
    attention(network, 1).key_value_lengths = None


def upper_left(network: Network) -> None:
    attention(network, 1).causal_kind = network.trt.CausalMaskKind.UPPER_LEFT


def not_causal(network: Network) -> None:
    attention(network, 1).causal_kind = network.trt.CausalMaskKind.NONE


def another_window(network: Network) -> None:
    attention(network, 2).mask = attention(network, 0).mask


def no_output(network: Network) -> None:
    network.definition.unmark_output(update(network, "present_key.2").get_output(0))


def another_cache(network: Network) -> None:
    update(network, "present_key.0").set_input(0, tensor(network, "past_value.0"))


def old_keys(network: Network) -> None:
    attention(network, 0).set_input(1, tensor(network, "past_key.0"))


def spare_input(network: Network) -> None:
    network.definition.add_input("spare", network.trt.int64, (1,))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (no_lengths, "attention.1 has lost the lengths of its keys"),
        (upper_left, "attention.1 is causal upper-left, expected lower-right"),
        (not_causal, "attention.1 is causal none, expected lower-right"),
        (another_window, "attention.2 has lost the mask of its window"),
        (no_output, "present_key.2 is written to past_key.2, expected past_key.2, from input to output"),
        (another_cache, "present_key.0 is written to past_value.0, expected past_key.0"),
        (old_keys, "attention.0 reads .* instead of its query and its cache"),
        (spare_input, "no output depends on input spare"),
    ],
)
def test_a_network_with_a_piece_missing_is_refused(
    rtx: Any, graph: LoweredGraph, break_it: Break, message: str
) -> None:
    network, expected = make_network(rtx, graph.model(), "x.plan")
    check_network(network, graph.contract, expected, "x.plan")

    break_it(network)

    with pytest.raises(EngineError, match=f"^x.plan: {message}"):
        check_network(network, graph.contract, expected, "x.plan")


def test_a_window_that_is_lost_on_the_way_is_refused(rtx: Any, graph: LoweredGraph) -> None:
    """A mask that is set cannot be taken away in a network, so the graph that is parsed lacks it."""
    _, expected = make_network(rtx, graph.model(), "x.plan")
    model = graph.model()
    next(node for node in model.graph if node.name == "attention.2").replace_input_with(3, None)
    network, _ = make_network(rtx, model, "x.plan")

    with pytest.raises(EngineError, match="attention.2 has lost the mask of its window"):
        check_network(network, graph.contract, expected, "x.plan")


def test_what_the_parser_makes_by_itself_is_refused(
    rtx: Any, graph: LoweredGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hide_outputs(network: Network, expected: Sequence[ExpectedAttention]) -> None:
        for name in {expectation.lengths for expectation in expected}:
            network.definition.unmark_output(network.tensors()[name])

    monkeypatch.setattr(tensorrt_network, "wire_attentions", hide_outputs)
    with pytest.raises(EngineError, match="attention.0 has lost the lengths of its keys"):
        compile_plan(rtx, graph.model(), graph.job(tmp_path / "x.plan"), "sm89")
    assert not (tmp_path / "x.plan").exists()


def test_gemmas_norms_are_rounded_once(rtx: Any, graph: LoweredGraph) -> None:
    """In HF's class they scale in fp32; the parser would round before, and the scale too, were its two types apart."""
    network, _ = make_network(rtx, graph.model(), "x.plan")
    norms = [layer for layer in network.layers() if "RMSNormalization" in layer.name]
    assert norms
    assert {layer.get_output(0).dtype for layer in norms} == {rtx.float32}
