"""What prefill and decode compute, counted in the .onnx files themselves: nothing more than the method asks for."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest

from engine_kit import BOUNDARIES, DEEP, PLANS, EngineKit, Plan, TinyModels
from pop_engine.configs.io_contract import BOUNDARY_ROWS, CONTEXT_ROWS, INPUT_IDS, POSITION_IDS, Boundary

PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
ATTENTION = "GroupQueryAttention"
CACHE_WRITE = "TensorScatter"
FULL_LAYER = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
CONTEXT_LAYER = frozenset({"k_proj", "v_proj"})
SMOLLM2: Plan = (30, 10)
plans = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"tail{plan[1]}of{plan[0]}")


@dataclass
class Graph:
    """One graph of an engine without its weights."""

    path: Path
    nodes: list[onnx.NodeProto] = field(init=False)
    makers: dict[str, onnx.NodeProto] = field(init=False)
    weights: dict[str, tuple[str, ...]] = field(init=False)
    num_embedded_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        graph = onnx.load(str(self.path), load_external_data=False).graph
        self.nodes = list(graph.node)
        self.makers = {output: node for node in self.nodes for output in node.output if output}
        self.weights = {
            weight.name: tuple(sorted(f"{entry.key}={entry.value}" for entry in weight.external_data))
            for weight in graph.initializer
            if weight.external_data
        }
        embedded = [weight for weight in graph.initializer if not weight.external_data]
        embedded += [node.attribute[0].t for node in graph.node if node.op_type == "Constant"]
        self.num_embedded_bytes = sum(tensor.ByteSize() for tensor in embedded)

    def count(self, *op_types: str) -> int:
        return sum(node.op_type in op_types for node in self.nodes)

    def products(self) -> Counter[str]:
        """How often each weight is multiplied by. A product with stacked weights counts for each of them."""
        return Counter(
            self.scaled(part) for node in self.nodes if node.op_type in PRODUCTS for part in self.stacked(node.input[1])
        )

    def stacked(self, name: str) -> list[str]:
        """What a product's weight is made of: itself, or the parts of a stack."""
        maker = self.makers.get(name)
        return [name] if maker is None or maker.op_type != "Concat" else list(maker.input)

    def scaled(self, name: str) -> str:
        """The matrix of a part, which a norm's weight may scale. Fails for what is not of the checkpoint."""
        maker = self.makers.get(name)
        if maker is not None and maker.op_type == "Mul":
            name, norm = maker.input
            assert norm in self.weights
        assert name in self.weights
        return name

    def attentions(self) -> dict[int, onnx.NodeProto]:
        """By layer, which its cache output's name tells."""
        found = {}
        for node in self.nodes:
            if node.op_type == ATTENTION:
                found[int(node.output[1].split(".")[1])] = node
        return found

    def sources(self, name: str) -> set[str]:
        """The graph inputs that a value's rows come from. A choice of rows ends the way, and is its own source."""
        found, seen, waiting = set(), set(), [name]
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            node = self.makers.get(value)
            if node is None:
                found.add(value)
            elif node.op_type == "Gather" and (rows := self._chosen_rows(node)):
                found.add(rows)
            else:
                # An attention has as many rows as its query; its keys come from everywhere.
                waiting += node.input[:1] if node.op_type == ATTENTION else node.input
        return found & {INPUT_IDS, POSITION_IDS, BOUNDARY_ROWS, CONTEXT_ROWS}

    def _chosen_rows(self, gather: onnx.NodeProto) -> str | None:
        """Which of the row inputs a Gather's indices are, or None where it looks up something else."""
        name = gather.input[1]
        while name in self.makers and self.makers[name].op_type in ("Reshape", "Identity", "Cast"):
            name = self.makers[name].input[0]
        return name if name in (BOUNDARY_ROWS, CONTEXT_ROWS) else None


def expected_products(plan: Plan, boundary: Boundary | None) -> Counter[str]:
    """Products by weight: of the prefill graph, or with no boundary of the decode graph."""
    num_layers, num_tail_layers = plan
    num_trunk_layers = num_layers if boundary is None else num_layers - num_tail_layers
    if boundary == "two-step" and not num_tail_layers:
        # No logits, so nothing but the cache reads the last layer: it is pruned as a tail of one, at no loss.
        num_trunk_layers -= 1
    expected: Counter[str] = Counter()
    for layer_idx in range(num_layers):
        full = layer_idx < num_trunk_layers or boundary == "one-pass"
        names = list(FULL_LAYER) if full else list(CONTEXT_LAYER)
        if layer_idx >= num_trunk_layers and boundary == "one-pass":
            names += CONTEXT_LAYER
        for name in names:
            module = "self_attn" if name in {"q_proj", "k_proj", "v_proj", "o_proj"} else "mlp"
            expected[f"model.layers.{layer_idx}.{module}.{name}.weight"] += 1
    if boundary != "two-step":
        expected["model.embed_tokens.weight"] += 1
    return expected


@plans
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_product_is_one_that_the_method_asks_for(tiny: TinyModels, plan: Plan, boundary: Boundary) -> None:
    directory = tiny.directory(plan, boundary)
    assert Graph(directory / "prefill.onnx").products() == expected_products(plan, boundary)
    assert Graph(directory / "decode.onnx").products() == expected_products(plan, None)


@plans
def test_a_two_step_tail_attends_to_nothing(tiny: TinyModels, plan: Plan) -> None:
    directory, (num_layers, num_tail_layers) = tiny.directory(plan, "two-step"), plan
    prefill = Graph(directory / "prefill.onnx")
    assert sorted(prefill.attentions()) == list(range(num_layers - max(num_tail_layers, 1)))
    assert prefill.count(CACHE_WRITE) == 2 * max(num_tail_layers, 1)
    # A graph names only the weights it uses, and the tail's others are not among them.
    assert set(prefill.weights) & set(expected_products(plan, None)) - {"model.embed_tokens.weight"} == set(
        expected_products(plan, "two-step")
    )


@plans
def test_a_one_pass_tail_attends_for_the_boundary_rows_alone(tiny: TinyModels, plan: Plan) -> None:
    check_one_pass_rows(Graph(tiny.directory(plan, "one-pass") / "prefill.onnx"), plan)


def check_one_pass_rows(prefill: Graph, plan: Plan) -> None:
    num_layers, num_tail_layers = plan
    attentions = prefill.attentions()
    assert sorted(attentions) == list(range(num_layers))
    for layer_idx, node in attentions.items():
        is_tail = layer_idx >= num_layers - num_tail_layers
        query, key, value = (prefill.sources(name) for name in node.input[:3])
        assert query == key == ({BOUNDARY_ROWS} if is_tail else {INPUT_IDS, POSITION_IDS}), layer_idx
        assert value <= query, layer_idx
        assert value, layer_idx
    writes = [node for node in prefill.nodes if node.op_type == CACHE_WRITE]
    assert len(writes) == 2 * num_tail_layers
    assert all(prefill.sources(node.input[1]) == {CONTEXT_ROWS} for node in writes)
    assert prefill.sources("logits") == {BOUNDARY_ROWS}


@plans
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_context_rows_take_one_product_for_all_keys_and_one_for_all_values(
    tiny: TinyModels, plan: Plan, boundary: Boundary
) -> None:
    prefill = Graph(tiny.directory(plan, boundary) / "prefill.onnx")
    num_tail_layers = plan[1]
    stacks = [node for node in prefill.nodes if node.op_type in PRODUCTS and len(prefill.stacked(node.input[1])) > 1]
    assert len(stacks) == (2 if num_tail_layers > 1 else 0)
    layers = [f"model.layers.{layer_idx}." for layer_idx in range(plan[0] - num_tail_layers, plan[0])]
    for node, name in zip(stacks, ("k_proj", "v_proj"), strict=False):
        parts = [prefill.scaled(part) for part in prefill.stacked(node.input[1])]
        assert sorted(parts) == sorted(f"{layer}self_attn.{name}.weight" for layer in layers)


@plans
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_decode_attends_in_every_layer_and_writes_with_it(tiny: TinyModels, plan: Plan, boundary: Boundary) -> None:
    decode = Graph(tiny.directory(plan, boundary) / "decode.onnx")
    assert sorted(decode.attentions()) == list(range(plan[0]))
    assert decode.count(CACHE_WRITE) == 0
    assert decode.sources("logits") == {INPUT_IDS, POSITION_IDS}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_both_graphs_read_one_copy_of_the_weights(tiny: TinyModels, boundary: Boundary) -> None:
    directory = tiny.directory((DEEP, 10), boundary)
    graphs = [Graph(directory / f"{phase}.onnx") for phase in ("prefill", "decode")]
    # Less than the smallest matrix: no weight is inside a graph's own file.
    assert max(graph.num_embedded_bytes for graph in graphs) < 64 * 32 * 4
    prefill, decode = (graph.weights for graph in graphs)
    # Every place, offset and size as the other graph has it.
    assert prefill.items() <= decode.items()
    assert len(decode) == DEEP * 9 + 2
    for places in decode.values():
        location = dict(place.split("=") for place in places)["location"]
        assert (directory / "weights" / location).is_file()


@pytest.mark.smollm2
def test_smollm2_one_pass_has_231_products(smollm2_directory: Path) -> None:
    prefill = Graph(smollm2_directory / "prefill.onnx")
    assert prefill.products().total() == 20 * 7 + 10 * (2 + 7) + 1 == 231
    # The tail's 20 for context rows are two: all keys, all values.
    assert prefill.count(*PRODUCTS) == 231 - 20 + 2
    assert prefill.products() == expected_products(SMOLLM2, "one-pass")
    assert prefill.count(ATTENTION) == 30
    check_one_pass_rows(prefill, SMOLLM2)


@pytest.mark.smollm2
def test_smollm2_decode_has_211_products(smollm2_directory: Path) -> None:
    decode = Graph(smollm2_directory / "decode.onnx")
    assert decode.count(*PRODUCTS) == 30 * 7 + 1 == 211
    assert decode.products() == expected_products(SMOLLM2, None)
    assert decode.count(ATTENTION) == 30


@pytest.mark.nightly
@pytest.mark.smollm2
def test_smollm2_two_step_has_160_products(build_engine: EngineKit) -> None:
    directory = build_engine.directory("smollm2-135m", with_weights=False, boundary="two-step", tail_layers=10)
    prefill = Graph(directory / "prefill.onnx")
    assert prefill.products().total() == 20 * 7 + 10 * 2 == 160
    assert prefill.count(*PRODUCTS) == 160 - 20 + 2
    assert prefill.products() == expected_products(SMOLLM2, "two-step")
    assert prefill.count(ATTENTION) == 20
    assert prefill.count(CACHE_WRITE) == 20
