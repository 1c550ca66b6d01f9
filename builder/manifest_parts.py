"""From what a build produced to the manifest that describes it."""

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from pop_engine.builder.compile.target import Target, target_of
from pop_engine.builder.graph import BuiltGraph
from pop_engine.builder.graph_workers import BuiltGraphs
from pop_engine.configs.build_config import ResolvedBuild
from pop_engine.configs.calibration import CalibrationRecord
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import CacheShape
from pop_engine.configs.manifest import (
    DECODE_GRAPH,
    FORMAT_VERSION,
    PREFILL_GRAPH,
    WEIGHTS_DIRECTORY,
    BuildRecord,
    FileRecord,
    Manifest,
    ModelSource,
    TargetRecord,
    TokenizerRecord,
    VerificationRecord,
    WeightsRecord,
    record_file,
)
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.vision import VISION_GRAPH, ImageFacts, VisionRecord


@dataclass(frozen=True)
class EngineParts:
    """Everything a build has produced, before it is checked."""

    source: ModelSource
    dims: ModelDims
    resolved: ResolvedBuild
    cache: CacheShape
    graphs: BuiltGraphs
    weights: WeightsRecord | None
    tokenizer: TokenizerRecord | None
    calibration: CalibrationRecord | None = None
    images: ImageFacts | None = None
    processor_files: tuple[str, ...] = ()


def make_manifest(parts: EngineParts, staging: Path) -> Manifest:
    """The manifest of an engine that is still to be verified. Hashes every file beside the weights."""
    resolved = parts.resolved
    target = target_of(resolved.target, resolved.plans.engine_layout)
    return Manifest(
        format_version=FORMAT_VERSION,
        source=parts.source,
        dims=parts.dims,
        plan=resolved.plan,
        boundary=resolved.boundary,
        dtype=resolved.dtype,
        target=TargetRecord(
            target.name,
            _versions(target),
            decode_with=target.decode_with(resolved.boundary),
            gpu=parts.graphs.prefill.plan.gpu if parts.graphs.prefill.plan else None,
            engine_layout=resolved.plans.engine_layout if parts.graphs.prefill.plan else None,
            partition_check=target.partition_check,
        ),
        limits=resolved.limits,
        cache=parts.cache,
        prefill=_graph_record(PREFILL_GRAPH, parts.graphs.prefill),
        decode=_graph_record(DECODE_GRAPH, parts.graphs.decode),
        weights=parts.weights,
        tokenizer=parts.tokenizer,
        verification=VerificationRecord("skipped", "not yet run"),
        build=BuildRecord({}, 0, importlib.metadata.version("pop-engine")),
        files=_record_files(staging),
        boundary_window=resolved.boundary_window,
        calibration=parts.calibration,
        vision=_vision_record(parts),
    )


def _vision_record(parts: EngineParts) -> VisionRecord | None:
    if parts.images is None or parts.graphs.vision is None:
        return None
    return VisionRecord.of(parts.images, _graph_record(VISION_GRAPH, parts.graphs.vision), parts.processor_files)


def _graph_record(file: str, graph: BuiltGraph) -> GraphRecord:
    return GraphRecord(file, graph.contract, graph.operators, graph.plan)


def _versions(target: Target) -> dict[str, str]:
    packages = ("onnx", "torch", "transformers")
    return target.versions() | {package: importlib.metadata.version(package) for package in packages}


def _record_files(staging: Path) -> tuple[FileRecord, ...]:
    paths = sorted(path for path in staging.rglob("*") if path.is_file())
    names = [(path, path.relative_to(staging).as_posix()) for path in paths]
    return tuple(record_file(path, name) for path, name in names if not name.startswith(f"{WEIGHTS_DIRECTORY}/"))
