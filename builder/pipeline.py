"""The build, step by step: a checkpoint goes in, an engine directory comes out."""

import importlib.metadata
from pathlib import Path

from transformers import PretrainedConfig

from pop_engine.builder.analysis.find_calibration import find_calibration
from pop_engine.builder.checkpoint.layout import WeightLayout, plan_weights
from pop_engine.builder.checkpoint.source import open_checkpoint
from pop_engine.builder.checkpoint.writer import write_weights
from pop_engine.builder.compile.target import Target, target_of
from pop_engine.builder.export.kv_shapes import observe_kv_shapes
from pop_engine.builder.export.model import model_dims, parameter_shapes
from pop_engine.builder.graph_workers import GraphWorkers
from pop_engine.builder.images import find_image_facts, save_processor
from pop_engine.builder.manifest_parts import EngineParts, make_manifest
from pop_engine.builder.memory import PeakMemory
from pop_engine.builder.progress import BuildProgress
from pop_engine.builder.staging import publish, staging_directory
from pop_engine.builder.verify import verify_engine
from pop_engine.configs.build_config import BuildConfig, ResolvedBuild, resolve_build
from pop_engine.configs.errors import UsageError
from pop_engine.configs.io_contract import CacheShape
from pop_engine.configs.manifest import MANIFEST_NAME, BuildRecord, Manifest, VerificationRecord

# What the manifest is called until the engine is checked: nothing that looks like an engine lies there before.
UNCHECKED_NAME = "unchecked.json"


def build(config: BuildConfig, progress: BuildProgress) -> Manifest:
    """Build an engine directory; raises UsageError or EngineError, and then leaves nothing behind."""
    with staging_directory(config.out, force=config.force) as staging, PeakMemory() as memory:
        with progress.step("checkpoint"):
            checkpoint = open_checkpoint(config)
            dims = model_dims(checkpoint.hf_config)
            resolved = resolve_build(config.options.over(checkpoint.options), dims)
            target = target_of(resolved.target, resolved.plans.engine_layout)
            target.require()
            _check_window(resolved, target)
            _check_weights(resolved, has_weights=checkpoint.tensors is not None)
            images = find_image_facts(checkpoint, resolved.plan)
            parameters = parameter_shapes(checkpoint.hf_config)
            layout = plan_weights(parameters, checkpoint, resolved.dtype, resolved.weights, staging.parent)
            kv_shapes = observe_kv_shapes(checkpoint.hf_config, resolved.dtype, resolved.limits.max_seq_len)
            cache = CacheShape(kv_shapes, resolved.limits.max_seq_len, resolved.dtype)
        calibration = find_calibration(config, checkpoint, resolved.plan, progress)
        if calibration is not None:
            layout = layout.with_calibration(calibration.shapes)

        with GraphWorkers(checkpoint.hf_config, resolved, cache, layout, staging, config.dump_dir, images) as workers:
            with progress.step("weights") as advance:
                has_weights = checkpoint.tensors is not None
                calibrated = None if calibration is None else calibration.stored()
                weights = write_weights(layout, checkpoint, staging, advance, calibrated) if has_weights else None
                workers.weights_written()
                tokenizer = checkpoint.save_tokenizer(staging)
                processor_files = save_processor(checkpoint, staging)
            with progress.step("graphs"):
                graphs = workers.results()

        record = None if calibration is None else calibration.record
        parts = EngineParts(
            checkpoint.source, dims, resolved, cache, graphs, weights, tokenizer, record, images, processor_files
        )
        manifest = make_manifest(parts, staging)
        with progress.step("verification"):
            verification = _skipped(config, target, has_weights=has_weights)
            if verification is None:
                verification = _verify(staging, manifest, checkpoint.hf_config, layout)

        manifest = manifest.with_verification(
            verification,
            BuildRecord(dict(progress.step_seconds), memory.peak_bytes, importlib.metadata.version("pop-engine")),
        )
        manifest.save(staging / MANIFEST_NAME)
        publish(staging, Path(config.out))
    return manifest


def _check_window(resolved: ResolvedBuild, target: Target) -> None:
    most = target.num_boundary
    if resolved.boundary == "one-pass" and isinstance(most, int) and resolved.boundary_window > most:
        raise UsageError(
            f"--boundary-window {resolved.boundary_window}: {target.name} takes at most {most} in one pass; "
            "leave it out, or add --boundary two-step"
        )


def _check_weights(resolved: ResolvedBuild, *, has_weights: bool) -> None:
    if resolved.plans.holds_weights and not has_weights:
        layout = resolved.plans.engine_layout
        raise UsageError(f"--engine-layout {layout}: plans hold the weights; leave --no-weights or {layout} out")


def _verify(staging: Path, manifest: Manifest, config: PretrainedConfig, layout: WeightLayout) -> VerificationRecord:
    manifest.save(staging / UNCHECKED_NAME)
    verification = verify_engine(staging, UNCHECKED_NAME, manifest, config, layout)
    (staging / UNCHECKED_NAME).unlink()
    return verification


def _skipped(config: BuildConfig, target: Target, *, has_weights: bool) -> VerificationRecord | None:
    if not has_weights:
        return VerificationRecord("skipped", "built without weights")
    if not target.runs_here:
        return VerificationRecord("skipped", f"{target.name} plans run on a GPU: compare them there")
    return None if config.verify else VerificationRecord("skipped", "--no-verify")
