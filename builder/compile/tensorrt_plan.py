"""Compile a wired network for one GPU, and write down what came out."""

import time
from typing import Any

import onnx_ir as ir

from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt_check import check_network
from pop_engine.builder.compile.tensorrt_facts import (
    read_attentions,
    read_constants,
    read_contract,
    read_weights_inside,
)
from pop_engine.builder.compile.tensorrt_network import Network, make_network
from pop_engine.builder.compile.tensorrt_profiles import binding_range, profiles
from pop_engine.builder.compile.tensorrt_weights import map_weights
from pop_engine.builder.compile.timing_cache import timing_cache
from pop_engine.configs.plan_record import PlanRecord, ProfileRecord
from pop_engine.plugins.tensorrt_messages import Module


def compile_plan(trt: Module, model: ir.Model, job: PlanJob, gpu: str) -> PlanRecord:
    """Parse, wire, check and compile a lowered graph; `model` is used up.

    `gpu` is recorded; a plan is compiled for the GPU that `job` names, or for the one that is here where it names
    none. Raises EngineError where TensorRT refuses the graph, or would compute something else than it says.
    """
    started = time.perf_counter()
    network, expected = make_network(trt, model, job.out.name, map_weights(model, job))
    check_network(network, job.contract, expected, job.out.name)
    shapes = profiles(job)
    config = _config(network, job, shapes)
    with timing_cache(trt, config, job.options.timing_cache):
        serialized = network.builder.build_serialized_network(network.definition, config)
        if serialized is None:
            raise network.messages.failure(f"{job.out.name}: TensorRT cannot compile it for {gpu}")
    job.out.write_bytes(memoryview(serialized))
    return PlanRecord(
        file=job.out.name,
        gpu=gpu,
        num_bytes=job.out.stat().st_size,
        contract=read_contract(network, job.contract),
        profiles=shapes,
        attentions=read_attentions(network),
        constants=read_constants(network),
        num_layers=network.definition.num_layers,
        weights_inside=read_weights_inside(network),
        optimization_level=job.options.optimization_level,
        timing_cache=job.options.timing_cache is not None,
        weight_streaming=config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING),
        version_compatible=config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE),
        compile_seconds=round(time.perf_counter() - started, 2),
    )


def _config(network: Network, job: PlanJob, shapes: tuple[ProfileRecord, ...]) -> Any:
    trt = network.trt
    config = network.builder.create_builder_config()
    options = job.options
    if options.gpu is not None:
        # Naming the GPU is what lets the builder run where there is none.
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, options.gpu.upper()), 0)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        # TensorRT-RTX captures a CUDA graph over activations that the runtime lends only where this is set.
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    for record in shapes:
        profile = network.builder.create_optimization_profile()
        for binding in job.contract.inputs:
            if any(isinstance(dim, str) for dim in binding.shape):
                profile.set_shape(binding.name, *binding_range(binding, record))
        config.add_optimization_profile(profile)
    return config
