"""All graphs at once, each traced in a process of its own: tracing is slow, and one core's work."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.compile.target import target_of
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.builder.export.trace import GraphSpec
from pop_engine.builder.export.vision import VisionSpec
from pop_engine.builder.graph import BuiltGraph, GraphJob
from pop_engine.builder.graph_process import GraphProcess, interrupts_held
from pop_engine.configs.build_config import ResolvedBuild
from pop_engine.configs.io_contract import CacheShape, GraphContract, Phase, decode_contract, prefill_contract
from pop_engine.configs.manifest import DECODE_GRAPH, PREFILL_GRAPH
from pop_engine.configs.vision import VISION_GRAPH, ImageFacts


@dataclass(frozen=True)
class BuiltGraphs:
    """The graphs of an engine; `vision` where the model takes images."""

    prefill: BuiltGraph
    decode: BuiltGraph
    vision: BuiltGraph | None = None


class GraphWorkers:
    """Starts tracing when it is entered; `results` waits. Leaving it early ends the processes."""

    def __init__(
        self,
        config: PretrainedConfig,
        resolved: ResolvedBuild,
        cache: CacheShape,
        layout: WeightLayout,
        staging: Path,
        dump_dir: Path | None,
        images: ImageFacts | None = None,
    ) -> None:
        vocab_size = config.get_text_config(decoder=True).vocab_size
        plan, boundary, dtype = resolved.plan, resolved.boundary, resolved.dtype
        target = target_of(resolved.target, resolved.plans.engine_layout)
        inputs = None if images is None else images.inputs

        def prefill(*, boundary_writes: bool) -> GraphContract:
            return prefill_contract(
                plan,
                boundary,
                cache,
                vocab_size,
                boundary_writes=boundary_writes,
                num_boundary=target.num_boundary,
                images=inputs,
            )

        traced, lowered = prefill(boundary_writes=False), prefill(boundary_writes=target.boundary_writes)
        decode = decode_contract(cache, vocab_size, inputs)
        if dump_dir is not None:
            dump_dir.mkdir(parents=True, exist_ok=True)

        def job(spec: GraphSpec | VisionSpec, after: GraphContract, file: str) -> GraphJob:
            return GraphJob(
                config, target.name, spec, after, layout, resolved.limits, resolved.plans, staging / file, dump_dir
            )

        def text(phase: Phase, own: GraphContract) -> GraphSpec:
            return GraphSpec(phase, plan, boundary, own, dtype, calibrated=layout.is_calibrated)

        self._jobs = [
            job(text("prefill", traced), lowered, PREFILL_GRAPH),
            job(text("decode", decode), decode, DECODE_GRAPH),
        ]
        if (family := vision_family(config)) is not None:
            vision = VisionSpec(family.vision_contract(config, dtype), dtype, family.patches_per_token(config))
            self._jobs.append(job(vision, vision.contract, VISION_GRAPH))

        self._workers: list[GraphProcess] = []

    def __enter__(self) -> "GraphWorkers":
        try:
            with interrupts_held():
                for job in self._jobs:
                    self._workers.append(GraphProcess(job))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()

    def weights_written(self) -> None:
        """Let plans be compiled that hold the weights."""
        for worker in self._workers:
            worker.weights_written()

    def results(self) -> BuiltGraphs:
        """Wait for all graphs. Raises what building one raised, EngineError where its process was killed."""
        return BuiltGraphs(*(worker.receive() for worker in self._workers))
