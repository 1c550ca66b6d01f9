"""What the engine tests share: tiny checkpoints, engines built from them, and a look into an engine's cache."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import pytest
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from pop_engine.builder import graph, pipeline
from pop_engine.builder.export.trace import GraphSpec, trace_graph
from pop_engine.builder.export.vision import VisionSpec, trace_vision
from pop_engine.builder.graph import build_graph
from pop_engine.builder.graph_workers import BuiltGraphs, GraphWorkers
from pop_engine.builder.progress import BuildProgress
from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.io_contract import Boundary, past_key, past_value
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.runtime import Engine
from pop_engine.runtime.kv_cache import SlotRange
from pop_reference import ReferenceCache

# Layers and tail layers.
Plan = tuple[int, int]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)

# Layers of the two tiny models: what most tests use, and one deep enough for the tail of 10 layers.
SMALL, DEEP = 4, 12
# Tails of 0, 1, L - 1 and 10 layers.
PLANS: tuple[Plan, ...] = ((SMALL, 0), (SMALL, 1), (SMALL, SMALL - 1), (DEEP, 10))
VOCAB_SIZE = 320
MAX_SEQ_LEN = 48
NUM_SLOTS = 4
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant:"
)
_SPECIAL_TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>"]
_CORPUS = ["the cat sat on the mat and then the other cat ran to the hat", "user assistant system\n", "naïve café"]


def save_tiny_checkpoint(folder: Path, num_layers: int) -> Path:
    """A random Llama with a byte-level tokenizer and a chat template, in the form that transformers saves."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # A few ids fewer than the model has rows: checkpoints pad their vocabulary.
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=_SPECIAL_TOKENS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id("<|end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Large enough that attention is far from uniform and the top logits far apart.
            drawn = torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.2
            weight.copy_(drawn)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load_hf_model(folder: Path) -> Any:
    """A checkpoint in Hugging Face's own class, fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


class _InProcessWorkers(GraphWorkers):
    """Builds here and now: starting processes takes longer than tracing a tiny model. Same jobs, same `build_graph`."""

    def __enter__(self) -> "_InProcessWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def results(self) -> BuiltGraphs:
        return BuiltGraphs(*map(build_graph, self._jobs))


class SharedTraces:
    """Traces each graph once: what is traced depends on the model and the graph's spec, not on target or limits.

    Tracing is nearly all of a tiny build's time. Stands for `trace_graph` or `trace_vision`; every call gets a copy
    of its own.
    """

    def __init__(self, trace: Callable[[PretrainedConfig, Any], tuple[ir.Model, dict[str, str]]]) -> None:
        self._trace = trace
        self._traces: dict[str, tuple[ir.Model, dict[str, str]]] = {}

    def __call__(self, config: PretrainedConfig, spec: GraphSpec | VisionSpec) -> tuple[ir.Model, dict[str, str]]:
        if isinstance(spec, GraphSpec) and spec.phase == "decode":
            # The full model, whatever prefill leaves out.
            plan = PrunePlan(spec.plan.num_hidden_layers, 0)
            spec = dataclasses.replace(spec, plan=plan, boundary="one-pass", calibrated=False)
        key = f"{config.to_json_string()} {spec}"
        if key not in self._traces:
            self._traces[key] = self._trace(config, spec)
        model, names = self._traces[key]
        return model.clone(), dict(names)


# The exporter reads all it knows anew for every graph, which takes a second.
_read_registry = functools.cache(ONNXRegistry.from_torchlib)


class EngineKit:
    """Builds engines and keeps them: one build for each set of options, one loaded engine for each build.

    Test processes with one root share their builds: the first that wants an engine builds it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._engines: dict[Path, Engine] = {}
        self._traces = SharedTraces(trace_graph)
        self._vision_traces = SharedTraces(trace_vision)

    def directory(
        self,
        model: str | Path,
        *,
        verify: bool = False,
        with_weights: bool = True,
        calibration: Path | None = None,
        **options: Any,
    ) -> Path:
        """An engine directory, built with these BuildOptions. Not to be changed: others use it too.

        With `verify` it is built exactly as pop-build does it, in processes of its own.
        """
        key = (str(model), verify, with_weights, str(calibration), *sorted(options.items()))
        out = self._root / sha256(repr(key).encode()).hexdigest()[:16]
        with FileLock(f"{out}.lock"):
            if not out.is_dir():
                config = BuildConfig(
                    str(model),
                    out,
                    BuildOptions(**options),
                    verify=verify,
                    with_weights=with_weights,
                    calibration=calibration,
                )
                self._build(config)
        return out

    def _build(self, config: BuildConfig) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if not config.verify:
                patch.setattr(pipeline, "GraphWorkers", _InProcessWorkers)
                patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_read_registry))
                patch.setattr(graph, "trace_graph", self._traces)
                patch.setattr(graph, "trace_vision", self._vision_traces)
            pipeline.build(config, BuildProgress(verbose=False))

    def __call__(self, model: str | Path, **options: Any) -> Engine:
        """A loaded engine, shared: leave its slots free and its manifest as it was."""
        directory = self.directory(model, **options)
        if directory not in self._engines:
            self._engines[directory] = Engine.load(directory, threads=1)
        engine = self._engines[directory]
        assert engine.num_free_slots == engine.manifest.limits.max_batch_size, "an earlier test kept a slot"
        return engine

    def close(self) -> None:
        """Give up the loaded engines."""
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


class TinyModels:
    """The tiny checkpoints by their number of layers, and their engines by plan and boundary."""

    def __init__(self, kit: EngineKit, root: Path) -> None:
        self._kit = kit
        self._root = root
        self._models: dict[int, Any] = {}

    def checkpoint(self, num_layers: int = SMALL) -> Path:
        """The checkpoint's folder, the same for every test process."""
        folder = self._root / f"layers{num_layers}"
        with FileLock(f"{folder}.lock"):
            return folder if folder.is_dir() else save_tiny_checkpoint(folder, num_layers)

    def hf_model(self, num_layers: int = SMALL) -> Any:
        """The checkpoint in Hugging Face's own class."""
        if num_layers not in self._models:
            self._models[num_layers] = load_hf_model(self.checkpoint(num_layers))
        return self._models[num_layers]

    def engine(self, plan: Plan, boundary: Boundary) -> Engine:
        """A loaded engine, shared: leave its slots free and its manifest as it was."""
        return self._kit(self.checkpoint(plan[0]), **_options(plan, boundary))

    def directory(self, plan: Plan, boundary: Boundary) -> Path:
        """The engine's directory. Not to be changed."""
        return self._kit.directory(self.checkpoint(plan[0]), **_options(plan, boundary))


def _options(plan: Plan, boundary: Boundary) -> dict[str, Any]:
    limits = {"max_seq_len": MAX_SEQ_LEN, "max_batch_size": NUM_SLOTS}
    return {"tail_layers": plan[1], "boundary": boundary, **limits}


@contextmanager
def taken_slots(engine: Engine, count: int) -> Iterator[list[int]]:
    """Slots of an engine, given back at the end."""
    slots = [engine.allocate_slot() for _ in range(count)]
    try:
        yield slots
    finally:
        for slot in slots:
            engine.free_slot(slot)


@contextmanager
def chunks_of(engine: Engine, max_prefill_len: int) -> Iterator[None]:
    """Within it, the engine feeds prompts in chunks of this size."""
    manifest = engine.manifest
    limits = dataclasses.replace(manifest.limits, max_prefill_len=max_prefill_len)
    engine.manifest = dataclasses.replace(manifest, limits=limits)
    try:
        yield
    finally:
        engine.manifest = manifest


def cached(engine: Engine, slot: int) -> NDArray[np.float32]:
    """All that a slot holds, [layers, K and V, H_kv, tokens, D]: a copy.

    The public API shows no cache, on purpose; the pools behind the session are what the graphs are bound to.
    """
    session: Any = engine._session
    pool, length = session._prefill._pool, int(engine._slots.lengths[slot])
    names = ((past_key(layer_idx), past_value(layer_idx)) for layer_idx in range(len(engine.manifest.cache.layers)))
    return np.stack([[pool.view(name, SlotRange(slot, 1))[0, :, :length] for name in pair] for pair in names])


def stacked(cache: ReferenceCache) -> NDArray[np.float32]:
    """The reference's cache in the same form."""
    pairs = zip(cache.keys, cache.values, strict=True)
    return np.stack([[key[0].numpy(), value[0].numpy()] for key, value in pairs])


def random_tokens(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Token ids that repeat from run to run."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, count)]


def relative_error(found: NDArray[np.floating], expected: NDArray[np.floating]) -> float:
    """Largest absolute difference, in units of the largest expected magnitude. The shapes must be equal."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
