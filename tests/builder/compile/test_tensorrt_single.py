"""Plans with the weights inside: one that serves both phases, or two."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from engine_kit import EngineKit, TinyModels
from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt_check import check_network
from pop_engine.builder.compile.tensorrt_network import make_network
from pop_engine.builder.compile.tensorrt_weights import map_weights
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.configs.plan_options import EngineLayout, PlanOptions
from pop_engine.tools.inspect import main as inspect

OPTIONS: dict[str, Any] = {"target": "tensorrt-rtx", "tail_layers": 1, "max_seq_len": 64, "dtype": "fp16"}


def build(kit: EngineKit, tiny: TinyModels, layout: EngineLayout) -> Path:
    return kit.directory(tiny.checkpoint(), engine_layout=layout, **OPTIONS)


@pytest.fixture
def single(rtx: Any, build_engine: EngineKit, tiny: TinyModels) -> Path:
    return build(build_engine, tiny, "single")


def weights(directory: Path) -> dict[str, Any]:
    return load_file(directory / "weights" / "model.safetensors")


def test_one_plan_has_the_weights_and_decodes(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest, stored = Manifest.load(single), weights(single)
    plan = manifest.prefill.plan

    assert (manifest.target.engine_layout, manifest.target.decode_with) == ("single", "prefill")
    assert plan is not None
    assert manifest.decode.plan is None
    assert not (single / "decode.plan").exists()
    assert plan.contract.weights == ()
    assert plan.weights_inside.count == len(stored)
    assert plan.weights_inside.num_bytes == sum(array.nbytes for array in stored.values())
    assert sum(constant.num_bytes for constant in plan.constants) < 4096
    # One profile, for a second would pack the weights again: a step of all slots, and a whole chunk.
    assert [(profile.name, profile.dims) for profile in plan.profiles] == [
        ("chunk", {"batch": (1, 1, 8), "seq": (1, 64, 64), "num_context": (0, 63, 63)})
    ]
    assert {attention.causal for attention in plan.attentions} == {"lower-right"}

    assert inspect([str(single)]) == 0
    report = " ".join(capsys.readouterr().out.split())
    assert f"weights {len(stored)} inside" in report
    assert "decode all 4 layers, prefill graph" in report


def test_two_plans_have_the_weights_each(rtx: Any, build_engine: EngineKit, tiny: TinyModels) -> None:
    directory = build(build_engine, tiny, "constants")
    manifest, stored = Manifest.load(directory), weights(directory)

    assert (manifest.target.engine_layout, manifest.target.decode_with) == ("constants", "decode")
    for graph in (manifest.prefill, manifest.decode):
        assert graph.plan is not None
        assert graph.plan.contract.weights == ()
        assert graph.plan.weights_inside.count == len(stored)
    assert manifest.decode.plan is not None
    assert [profile.name for profile in manifest.decode.plan.profiles] == ["one-token", "few-tokens"]


def test_the_weights_inside_are_the_checkpoints(rtx: Any, single: Path) -> None:
    model, job = _model_and_job(single)
    mapped = map_weights(model, job)
    network, expected = make_network(rtx, model, "x.plan", mapped)

    check_network(network, job.contract, expected, "x.plan")
    found = {}
    for layer in network.layers():
        if layer.type == rtx.LayerType.CONSTANT and layer.name in mapped:
            layer.__class__ = rtx.IConstantLayer
            found[layer.name] = np.array(layer.weights).reshape(layer.shape)
    stored = weights(single)
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_weight_that_is_lost_is_refused(rtx: Any, single: Path) -> None:
    model, job = _model_and_job(single)
    mapped = map_weights(model, job)
    network, expected = make_network(rtx, model, "x.plan", mapped)
    extended = replace(network, weights={**mapped, "lost.weight": np.zeros(2, np.uint8)})
    with pytest.raises(EngineError, match=r"^x.plan: weight lost.weight is lost"):
        check_network(extended, job.contract, expected, "x.plan")


def test_a_weight_of_another_size_is_refused(rtx: Any, single: Path) -> None:
    model, job = _model_and_job(single)
    mapped = {name: data[:-2] for name, data in map_weights(model, job).items()}
    with pytest.raises(EngineError, match=r"^x.plan: TensorRT's parser refuses it"):
        make_network(rtx, model, "x.plan", mapped)


def test_it_needs_the_weights(rtx: Any, build_engine: EngineKit, tiny: TinyModels) -> None:
    with pytest.raises(
        UsageError, match="--engine-layout single: plans hold the weights; leave --no-weights or single out"
    ):
        build_engine.directory(tiny.checkpoint(), with_weights=False, engine_layout="single", **OPTIONS)


def _model_and_job(directory: Path) -> tuple[ir.Model, PlanJob]:
    manifest = Manifest.load(directory)
    options = PlanOptions("single", "sm89")
    layout = WeightLayout("copy", "weights", "fp16", {})
    job = PlanJob("prefill", manifest.prefill.contract, manifest.limits, options, layout, directory / "x.plan")
    return ir.load(directory / "prefill.onnx"), job
