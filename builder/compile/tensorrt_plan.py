"""Compile a wired network for one GPU, and write down what came out."""

import time
from typing import Any

import onnx_ir as ir

from pop_engine.builder.compile.plan_job import PlanJob
from pop_engine.builder.compile.tensorrt_check import check_network
from pop_engine.builder.compile.tensorrt_facts import read_attentions, read_constants, read_contract
from pop_engine.builder.compile.tensorrt_module import Module
from pop_engine.builder.compile.tensorrt_network import Network, make_network
from pop_engine.builder.compile.tensorrt_profiles import binding_range, profiles
from pop_engine.configs.plan_record import PlanRecord, ProfileRecord


def compile_plan(trt: Module, model: ir.Model, job: PlanJob, gpu: str) -> PlanRecord:
    """Parse, wire, check and compile a lowered graph; `model` is used up.

    `gpu` is recorded; a plan is compiled for `job.gpu`, or for the GPU that is here where that is none. Raises
    EngineError where TensorRT refuses the graph, or would compute something else than it says.
    """
    started = time.perf_counter()
    network, expected = make_network(trt, model, job.out.name)
    check_network(network, job.contract, expected, job.out.name)
    shapes = profiles(job)
    config = _config(network, job, shapes)
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
        weight_streaming=config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING),
        version_compatible=config.get_flag(trt.BuilderFlag.VERSION_COMPATIBLE),
        compile_seconds=round(time.perf_counter() - started, 2),
    )


def _config(network: Network, job: PlanJob, shapes: tuple[ProfileRecord, ...]) -> Any:
    trt = network.trt
    config = network.builder.create_builder_config()
    if job.gpu is not None:
        # Naming the GPU is what lets the builder run where there is none.
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, job.gpu.upper()), 0)
    for record in shapes:
        profile = network.builder.create_optimization_profile()
        for binding in job.contract.inputs:
            if any(isinstance(dim, str) for dim in binding.shape):
                profile.set_shape(binding.name, *binding_range(binding, record))
        config.add_optimization_profile(profile)
    return config
