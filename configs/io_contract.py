"""Every binding of the graphs: its name, shape, dtype and alias. Nothing else spells a binding's name."""

from dataclasses import dataclass
from typing import Literal

from pop_engine.configs.prune_plan import PrunePlan

Boundary = Literal["one-pass", "two-step"]
Phase = Literal["prefill", "decode"]
# The graphs of an engine. The vision graph, which only a model with images has, runs once an image, before prefill.
GraphName = Literal["prefill", "decode", "vision"]
# One position a token, or three (time, row, column): Qwen-VL's multimodal rotary embedding.
Positions = Literal["text", "mrope"]
NUM_MROPE_AXES = 3

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
CACHE_LEN = "cache_len"
CONTEXT_ROWS = "context_rows"
BOUNDARY_ROWS = "boundary_rows"
LOGITS = "logits"

IMAGE_IDS = "image_ids"
IMAGE_EMBEDS = "image_embeds"
DEEPSTACK_EMBEDS = "deepstack_embeds"
PIXEL_VALUES = "pixel_values"
POSITION_INDICES = "position_indices"
POSITION_WEIGHTS = "position_weights"
ROTARY_POSITIONS = "rotary_positions"
IMAGE_FEATURES = "image_features"
DEEPSTACK_FEATURES = "deepstack_features"

BATCH, SEQ, NUM_CONTEXT, NUM_BOUNDARY = "batch", "seq", "num_context", "num_boundary"
NUM_PATCHES, NUM_IMAGE_TOKENS = "num_patches", "num_image_tokens"


def past_key(layer_idx: int) -> str:
    """Name of a layer's K cache as a graph input."""
    return f"past_key.{layer_idx}"


def past_value(layer_idx: int) -> str:
    """Name of a layer's V cache as a graph input."""
    return f"past_value.{layer_idx}"


def present_key(layer_idx: int) -> str:
    """Name of a layer's K cache as a graph output."""
    return f"present_key.{layer_idx}"


def present_value(layer_idx: int) -> str:
    """Name of a layer's V cache as a graph output."""
    return f"present_value.{layer_idx}"


def boundary_write(present: str) -> str:
    """Name of the second write that a target's attention makes to a tail layer's cache, through the same buffer."""
    return f"{present}.boundary"


@dataclass(frozen=True)
class KVShape:
    """What one slot of one layer's cache holds per token."""

    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True)
class Binding:
    """One tensor that crosses a graph's edge. `alias` names the input whose buffer an output shares."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    alias: str | None = None


@dataclass(frozen=True)
class GraphContract:
    """The inputs and outputs of one graph, in the graph's order.

    `weights` are the parameters that a target takes as inputs, after the others and under the checkpoint's names.
    Elsewhere they are initializers, and no bindings.
    """

    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    weights: tuple[Binding, ...] = ()

    def names(self) -> frozenset[str]:
        """Names of all bindings but the weights."""
        return frozenset(binding.name for binding in (*self.inputs, *self.outputs))


@dataclass(frozen=True)
class ImageInputs:
    """What the text graphs of a model with images take beside the tokens.

    `num_deepstack` is how many of the first layers get image features added to their output.
    """

    hidden_size: int
    num_deepstack: int
    positions: Positions


@dataclass(frozen=True)
class CacheShape:
    """The KV cache that both graphs share: one entry of `layers` per decoder layer."""

    layers: tuple[KVShape, ...]
    max_seq_len: int
    dtype: str

    def bytes_per_token(self, item_bytes: int) -> int:
        """Bytes that one token of one sequence takes over all layers, K and V together."""
        return 2 * item_bytes * sum(kv.num_key_value_heads * kv.head_dim for kv in self.layers)


def _token_inputs(images: ImageInputs | None, dtype: str) -> list[Binding]:
    has_axes = images is not None and images.positions == "mrope"
    positions = (NUM_MROPE_AXES, BATCH, SEQ) if has_axes else (BATCH, SEQ)
    tokens = [
        Binding(INPUT_IDS, (BATCH, SEQ), "int64"),
        Binding(POSITION_IDS, positions, "int64"),
        Binding(CACHE_LEN, (BATCH,), "int64"),
    ]
    return tokens if images is None else tokens + _image_inputs(images, dtype)


def _image_inputs(images: ImageInputs, dtype: str) -> list[Binding]:
    """Which rows are of which image, counted from 1, and what stands there: zeros elsewhere."""
    rows = (BATCH, SEQ, images.hidden_size)
    inputs = [Binding(IMAGE_IDS, (BATCH, SEQ), "int64"), Binding(IMAGE_EMBEDS, rows, dtype)]
    if images.num_deepstack:
        inputs.append(Binding(DEEPSTACK_EMBEDS, (images.num_deepstack, *rows), dtype))
    return inputs


def _row_inputs(plan: PrunePlan, boundary: Boundary, num_boundary: int | str) -> list[Binding]:
    """Which rows of the call go through the tail in full, and which only write their K and V there."""
    if boundary == "two-step":
        return []
    rows = [Binding(BOUNDARY_ROWS, (num_boundary,), "int64")]
    if plan.num_tail_layers:
        rows.insert(0, Binding(CONTEXT_ROWS, (NUM_CONTEXT,), "int64"))
    return rows


def _cache_bindings(cache: CacheShape) -> tuple[list[Binding], list[Binding]]:
    past: list[Binding] = []
    present: list[Binding] = []
    names = ((past_key, present_key), (past_value, present_value))
    for layer_idx, kv in enumerate(cache.layers):
        shape = (BATCH, kv.num_key_value_heads, cache.max_seq_len, kv.head_dim)
        for past_name, present_name in names:
            past.append(Binding(past_name(layer_idx), shape, cache.dtype))
            present.append(Binding(present_name(layer_idx), shape, cache.dtype, past_name(layer_idx)))
    return past, present


def prefill_contract(
    plan: PrunePlan,
    boundary: Boundary,
    cache: CacheShape,
    vocab_size: int,
    *,
    boundary_writes: bool,
    num_boundary: int | str = NUM_BOUNDARY,
    images: ImageInputs | None = None,
) -> GraphContract:
    """Bindings of the prefill graph.

    `boundary_writes` says that the target writes a tail layer's cache twice in the one-pass form: the context
    rows, then the boundary rows. Both writes are outputs on the same buffer.
    `num_boundary` is 1 where a target must know the number of boundary rows. A chunk before the last, which has
    none, then gives all its rows as context rows and its last one once more as the boundary row: that row's K and V
    land behind the chunk, where the next chunk writes, and its logits mean nothing.
    """
    past, present = _cache_bindings(cache)
    outputs = [] if boundary == "two-step" else [Binding(LOGITS, (BATCH, num_boundary, vocab_size), cache.dtype)]
    outputs += present
    if boundary_writes and boundary == "one-pass":
        tail = {name for layer_idx in plan.tail for name in (past_key(layer_idx), past_value(layer_idx))}
        outputs += [Binding(boundary_write(b.name), b.shape, b.dtype, b.alias) for b in present if b.alias in tail]
    inputs = _token_inputs(images, cache.dtype) + _row_inputs(plan, boundary, num_boundary) + past
    return GraphContract(tuple(inputs), tuple(outputs))


def decode_contract(cache: CacheShape, vocab_size: int, images: ImageInputs | None = None) -> GraphContract:
    """Bindings of the decode graph: the full model over any number of new tokens, logits of every row."""
    past, present = _cache_bindings(cache)
    logits = Binding(LOGITS, (BATCH, SEQ, vocab_size), cache.dtype)
    return GraphContract((*_token_inputs(images, cache.dtype), *past), (logits, *present))


def patches_contract(
    images: ImageInputs, dtype: str, patch_size: int, *, num_taps: int, has_rotary: bool
) -> GraphContract:
    """Bindings of a vision graph that takes one image of any size as patches.

    `patch_size` is the numbers in one patch. `num_taps` is how many rows of a learned table of positions are mixed
    for each patch, 0 without a table; `has_rotary` asks for each patch's row and column.
    """
    inputs = [Binding(PIXEL_VALUES, (NUM_PATCHES, patch_size), "fp32")]
    if num_taps:
        inputs.append(Binding(POSITION_INDICES, (NUM_PATCHES, num_taps), "int64"))
        inputs.append(Binding(POSITION_WEIGHTS, (NUM_PATCHES, num_taps), "fp32"))
    if has_rotary:
        inputs.append(Binding(ROTARY_POSITIONS, (NUM_PATCHES, 2), "int64"))
    return GraphContract(tuple(inputs), _features(images, dtype, NUM_IMAGE_TOKENS))


def fixed_size_contract(images: ImageInputs, dtype: str, image_size: int, tokens_per_image: int) -> GraphContract:
    """Bindings of a vision graph that takes one square image of one size."""
    pixels = Binding(PIXEL_VALUES, (1, 3, image_size, image_size), "fp32")
    return GraphContract((pixels,), _features(images, dtype, tokens_per_image))


def _features(images: ImageInputs, dtype: str, num_tokens: int | str) -> tuple[Binding, ...]:
    rows = (num_tokens, images.hidden_size)
    features = [Binding(IMAGE_FEATURES, rows, dtype)]
    if images.num_deepstack:
        features.append(Binding(DEEPSTACK_FEATURES, (images.num_deepstack, *rows), dtype))
    return tuple(features)
