"""Experts: the NumPy reference against transformers, and the lowering in ONNX Runtime."""

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from pop_engine.builder.passes.experts import LowerExperts
from pop_engine.builder.passes.refuse_experts import RefuseExperts
from pop_engine.configs.errors import EngineError
from pop_engine.plugins.experts import DOMAIN, OP_TYPE, Gate, reference

NUM_EXPERTS, NUM_CHOSEN, WIDTH, INNER = 4, 2, 8, 6
PLAIN, CLAMPED = Gate(), Gate(1.702, 1.0, 1.5, is_interleaved=True)
Arrays = dict[str, NDArray[np.float32]]


def draw(num_rows: int) -> Arrays:
    """Rows, weights, and log weights of two experts that add up to one; the others are never chosen."""
    random = np.random.default_rng(num_rows)
    orders = [random.permutation(NUM_EXPERTS)[:NUM_CHOSEN] for _ in range(num_rows)]
    chosen = np.array(orders, dtype=np.int64).reshape(-1, NUM_CHOSEN)
    share = random.uniform(0.1, 0.9, (num_rows, 1))
    scores = np.full((num_rows, NUM_EXPERTS), -1e30)
    np.put_along_axis(scores, chosen, np.log(np.concatenate([share, 1 - share], axis=1)), axis=1)
    given = {"rows": random.standard_normal((num_rows, WIDTH)), "scores": scores}
    given |= {"gate_up": random.standard_normal((NUM_EXPERTS, 2 * INNER, WIDTH))}
    given |= {"down": random.standard_normal((NUM_EXPERTS, WIDTH, INNER))}
    return {name: array.astype(np.float32) for name, array in given.items()}


def graph(given: Arrays, gate: Gate) -> ir.Model:
    """The operator as it is traced, for any number of rows."""
    shapes = {name: [*array.shape] for name, array in given.items()}
    shapes["rows"][0] = shapes["scores"][0] = "tokens"
    values = [
        ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
        for name, shape in shapes.items()
    ]
    attributes = {"num_chosen": NUM_CHOSEN, "alpha": gate.alpha, "beta": gate.beta, "limit": gate.limit}
    node = ir.node(OP_TYPE, values, {**attributes, "is_interleaved": int(gate.is_interleaved)}, domain=DOMAIN)
    output = node.outputs[0]
    output.name, output.type, output.shape = "output", values[0].type, values[0].shape
    imports = {"": 24, DOMAIN: 1}
    return ir.Model(ir.Graph(values, [output], nodes=[node], opset_imports=imports, name="experts"), ir_version=11)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("gate", [PLAIN, CLAMPED], ids=["plain", "clamped"])
def test_lowering_in_onnx_runtime(num_rows: int, gate: Gate) -> None:
    given = draw(num_rows)
    model = graph(given, gate)
    LowerExperts()(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, given)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    np.testing.assert_allclose(found, reference(**wide, gate=gate, num_chosen=NUM_CHOSEN), atol=1e-5)


def test_reference_is_transformers() -> None:
    given = draw(5)
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": NUM_EXPERTS}
    experts = MixtralExperts(MixtralConfig(**sizes, num_experts_per_tok=NUM_CHOSEN))
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    weights, chosen = tensors["scores"].exp().topk(NUM_CHOSEN)
    with torch.no_grad():
        experts.gate_up_proj.copy_(tensors["gate_up"])
        experts.down_proj.copy_(tensors["down"])
        expected = experts(tensors["rows"], chosen, weights)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    np.testing.assert_allclose(reference(**wide, gate=PLAIN, num_chosen=NUM_CHOSEN), expected.numpy(), atol=1e-5)


def test_a_target_without_experts_says_so() -> None:
    with pytest.raises(
        EngineError, match="^mixtures of experts .1 layers. have no lowering for tensorrt-rtx; build for ort-cpu"
    ):
        RefuseExperts("tensorrt-rtx")(graph(draw(1), PLAIN))
