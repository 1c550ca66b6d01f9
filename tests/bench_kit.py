"""What the tests of pop-bench share: a manifest, and a worker that answers what it is told."""

from pop_engine.configs.errors import EngineError
from pop_engine.configs.graph_record import GraphRecord
from pop_engine.configs.io_contract import CacheShape, GraphContract, KVShape
from pop_engine.configs.manifest import (
    FORMAT_VERSION,
    BuildRecord,
    Limits,
    Manifest,
    ModelSource,
    TargetRecord,
    VerificationRecord,
    WeightsRecord,
)
from pop_engine.configs.model_dims import ModelDims
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.tools.bench_message import BenchReply, BenchRequest

GRAPH = GraphRecord("graph.onnx", GraphContract((), ()), {})
MANIFEST = Manifest(
    format_version=FORMAT_VERSION,
    source=ModelSource("smollm2-135m", "/models/smollm2"),
    dims=ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192),
    plan=PrunePlan(30, 10),
    boundary="one-pass",
    dtype="fp32",
    target=TargetRecord("ort-cpu", {"onnxruntime": "1.32.0"}, "prefill"),
    limits=Limits(2048, 8, 512),
    cache=CacheShape((KVShape(3, 64),) * 30, 2048, "float32"),
    prefill=GRAPH,
    decode=GRAPH,
    weights=WeightsRecord("copy", "weights", "fp32", 538_000_000, ()),
    tokenizer=None,
    verification=VerificationRecord("skipped"),
    build=BuildRecord({}, 0, "0.1.0"),
    files=(),
)


class CannedWorker:
    """Answers these replies, one after another, and keeps what it was asked. Without one left it fails."""

    def __init__(self, *replies: BenchReply, name: str = "worker", log: list[str] | None = None) -> None:
        self.peak_memory_bytes = 600_000_000
        self.name = name
        self.requests: list[BenchRequest] = []
        self._replies = iter(replies)
        self._log = log

    def ask(self, request: BenchRequest) -> BenchReply:
        self.requests.append(request)
        if self._log is not None:
            self._log.append(self.name)
        found = next(self._replies, None)
        if found is None:
            raise EngineError(f"{self.name}: has no reply left")
        return found
