"""What the tests of models with images share: a tiny Qwen3-VL, prompts with images, and its graphs run by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from pop_engine.configs import io_contract as io
from pop_engine.configs.io_contract import GraphContract
from pop_engine.configs.manifest import Manifest
from pop_reference import PromptImages

# Equal, so that a list of the wrong layers would have the right length.
NUM_LAYERS = NUM_VISION_LAYERS = 4
VOCAB_SIZE, HIDDEN_SIZE = 320, 64
IMAGE, VIDEO, START, END = 300, 301, 302, 303
NUM_DEEPSTACK = 2
PATCH, MERGE = 4, 2
# Odd ones too: the processor rounds them to whole tokens, eight pixels square.
SIZES = ((33, 57), (24, 40), (61, 22))

Array = NDArray[Any]


def tiny_config(*, tie: bool = False) -> Qwen3VLConfig:
    """Every feature of the family, in four decoder layers and four vision layers."""
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        },
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": NUM_VISION_LAYERS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tie,
    )


def save_tiny_qwen3_vl(folder: Path, *, tie: bool = False) -> Path:
    """A random checkpoint as transformers saves it, with weights large enough that the top logits lie far apart."""
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(tiny_config(tie=tie))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight) + 0.5 if weight.dim() == 1 else torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def processor() -> Any:
    """Hugging Face's own, with patches as small as the tiny model's."""
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, temporal_patch_size=2, merge_size=MERGE, size=size)


def load_hf_model(folder: Path) -> Any:
    """The checkpoint in Hugging Face's own class, fp32."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def random_image(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Noise of width and height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@dataclass(frozen=True)
class Prompt:
    """A prompt as the Hugging Face model takes it."""

    input_ids: torch.Tensor
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None

    @property
    def token_ids(self) -> list[int]:
        return [int(token_id) for token_id in self.input_ids[0]]

    def arguments(self) -> dict[str, torch.Tensor]:
        """What to call the model with."""
        if self.image_grid_thw is None or self.pixel_values is None:
            return {"input_ids": self.input_ids}
        return {
            "input_ids": self.input_ids,
            "mm_token_type_ids": (self.input_ids == IMAGE).int(),
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
        }


def make_prompt(pieces: list[int | Image.Image], seed: int = 0, num_dropped: int = 0) -> Prompt:
    """Text tokens, so many of them for each number, and images between their start and end tokens.

    The last `num_dropped` tokens are left out: after 1 a prompt that ends with an image ends with its last token.
    """
    random = np.random.default_rng(seed)
    images = [piece for piece in pieces if isinstance(piece, Image.Image)]
    processed = processor()(images, return_tensors="pt") if images else {}
    grids = iter(processed["image_grid_thw"]) if images else iter(())
    token_ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            token_ids += [int(token_id) for token_id in random.integers(0, IMAGE, piece)]
        else:
            token_ids += [START, *[IMAGE] * (int(next(grids).prod()) // MERGE**2), END]
    kept = token_ids[: len(token_ids) - num_dropped]
    return Prompt(torch.tensor([kept]), processed.get("pixel_values"), processed.get("image_grid_thw"))


@dataclass
class Rows:
    """What the text graphs take for some rows: everything has the rows as its axis of this number."""

    input_ids: Array
    position_ids: Array
    image_ids: Array
    image_embeds: Array
    deepstack_embeds: Array

    def part(self, start: int, end: int) -> "Rows":
        return Rows(
            self.input_ids[:, start:end],
            self.position_ids[:, :, start:end],
            self.image_ids[:, start:end],
            self.image_embeds[:, start:end],
            self.deepstack_embeds[:, :, start:end],
        )

    def inputs(self) -> dict[str, Array]:
        return {
            io.INPUT_IDS: self.input_ids,
            io.POSITION_IDS: self.position_ids,
            io.IMAGE_IDS: self.image_ids,
            io.IMAGE_EMBEDS: self.image_embeds,
            io.DEEPSTACK_EMBEDS: self.deepstack_embeds,
        }


@dataclass
class Graphs:
    """The graphs of one engine directory in ONNX Runtime, with nothing of our runtime between them and the test."""

    directory: Path
    manifest: Manifest = field(init=False)
    _sessions: dict[str, ort.InferenceSession] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.manifest = Manifest.load(self.directory)

    def encode(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> tuple[Array, Array]:
        """Features [T, hidden] and [num_deepstack, T, hidden] of one image."""
        vision = self.manifest.vision
        assert vision is not None
        assert vision.patches is not None
        grids = grid[None]
        indices, weights = get_vision_interpolation_indices_and_weights(
            grids, vision.patches.num_grid_per_side, align_corners=True, spatial_merge_size=MERGE
        )
        inputs = {
            io.PIXEL_VALUES: pixel_values,
            io.POSITION_INDICES: indices,
            io.POSITION_WEIGHTS: weights.float(),
            io.ROTARY_POSITIONS: get_vision_position_ids(grids, MERGE),
        }
        return tuple(self._session("vision.onnx").run(None, {k: v.numpy() for k, v in inputs.items()}))

    def rows(self, prompt: Prompt, hf_model: Any) -> Rows:
        """A prompt's rows: positions from Hugging Face, features from the vision graph."""
        num_rows = prompt.input_ids.shape[1]
        image_ids = np.zeros((1, num_rows), np.int64)
        embeds = np.zeros((1, num_rows, HIDDEN_SIZE), np.float32)
        deepstack = np.zeros((NUM_DEEPSTACK, 1, num_rows, HIDDEN_SIZE), np.float32)
        positions = np.broadcast_to(np.arange(num_rows), (3, 1, num_rows)).copy()
        if prompt.image_grid_thw is not None and prompt.pixel_values is not None:
            arguments = prompt.arguments()
            given = {name: arguments[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
            positions = hf_model.model.get_rope_index(**given)[0].numpy()
            places = iter(np.flatnonzero(prompt.input_ids[0].numpy() == IMAGE))
            pixels = iter(torch.split(prompt.pixel_values, prompt.image_grid_thw.prod(dim=-1).tolist()))
            for number, grid in enumerate(prompt.image_grid_thw, start=1):
                features, more = self.encode(next(pixels), grid)
                for token, row in enumerate(next(places) for _ in range(len(features))):
                    image_ids[0, row], embeds[0, row], deepstack[:, 0, row] = number, features[token], more[:, token]
        return Rows(prompt.input_ids.numpy(), positions, image_ids, embeds, deepstack)

    def prefill(self, rows: Rows, cache: dict[str, Array], num_first: int = 0) -> Array:
        """Logits after a prompt, prefilled as the boundary asks; one-pass in two calls where the first gets rows."""
        num_rows = rows.input_ids.shape[1]
        if self.manifest.boundary == "two-step":
            self.run("prefill.onnx", rows.part(0, num_rows - 1), cache, 0)
            return self.run("decode.onnx", rows.part(num_rows - 1, num_rows), cache, num_rows - 1)
        if num_first:
            self.run("prefill.onnx", rows.part(0, num_first), cache, 0, num_boundary=0)
        return self.run("prefill.onnx", rows.part(num_first, num_rows), cache, num_first, num_boundary=1)

    def full(self, rows: Rows, cache: dict[str, Array]) -> Array:
        """Logits after a prompt that goes through the decode graph: nothing is pruned."""
        return self.run("decode.onnx", rows, cache, 0)

    def decode(self, rows: Rows, cache: dict[str, Array], answer: list[int]) -> Array:
        """Logits after each token of an answer to these rows."""
        num_rows, position = rows.input_ids.shape[1], int(rows.position_ids.max()) + 1
        steps = enumerate(text_rows([token], position + step) for step, token in enumerate(answer))
        return np.stack([self.run("decode.onnx", own, cache, num_rows + step) for step, own in steps])

    def empty_cache(self) -> dict[str, Array]:
        """All caches of one slot, by the names of their inputs."""
        contract = self.manifest.decode.contract
        caches = [binding.alias for binding in contract.outputs if binding.alias is not None]
        shapes = {b.name: (1, *b.shape[1:]) for b in contract.inputs}
        return {name: np.zeros(shapes[name], np.float32) for name in caches}  # type: ignore[arg-type]

    def run(
        self, file: str, rows: Rows, cache: dict[str, Array], cache_len: int, num_boundary: int | None = None
    ) -> Array:
        """One call, which leaves `cache` as the graph leaves it; returns the logits of its last row, if it has any."""
        contract = self._contract(file)
        num_rows = rows.input_ids.shape[1]
        num_context = num_rows - (num_boundary or 0)
        given = rows.inputs() | cache | {
            io.CACHE_LEN: np.array([cache_len]),
            io.CONTEXT_ROWS: np.arange(num_context),
            io.BOUNDARY_ROWS: np.arange(num_context, num_rows),
        }  # fmt: skip
        taken = {binding.name: np.ascontiguousarray(given[binding.name]) for binding in contract.inputs}
        outputs = self._session(file).run(None, taken)
        logits = np.empty((0,), np.float32)
        for binding, value in zip(contract.outputs, outputs, strict=True):
            if binding.alias is not None:
                # A tail layer's cache is written twice, and the second output has both.
                cache[binding.alias] = value
            elif value.shape[1]:
                logits = value[0, -1]
        return logits

    def _contract(self, file: str) -> GraphContract:
        return {"prefill.onnx": self.manifest.prefill, "decode.onnx": self.manifest.decode}[file].contract

    def _session(self, file: str) -> ort.InferenceSession:
        if file not in self._sessions:
            options = ort.SessionOptions()
            options.log_severity_level, options.intra_op_num_threads = 4, 1
            weights = str((self.directory / "weights").resolve())
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", weights)
            graph = (self.directory / file).read_bytes()
            self._sessions[file] = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        return self._sessions[file]


def text_rows(token_ids: list[int], position: int) -> Rows:
    """Rows of text that begin at this position."""
    count = len(token_ids)
    return Rows(
        np.array([token_ids]),
        np.broadcast_to(position + np.arange(count), (3, 1, count)).copy(),
        np.zeros((1, count), np.int64),
        np.zeros((1, count, HIDDEN_SIZE), np.float32),
        np.zeros((NUM_DEEPSTACK, 1, count, HIDDEN_SIZE), np.float32),
    )


def golden_images(prompt: Prompt, hf_model: Any) -> PromptImages | None:
    """A prompt's images for the golden reference: positions and features are Hugging Face's."""
    if prompt.image_grid_thw is None:
        return None
    arguments = prompt.arguments()
    with torch.no_grad():
        encoded = hf_model.model.get_image_features(prompt.pixel_values, prompt.image_grid_thw)
    given = {name: arguments[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    return PromptImages(
        is_image=prompt.input_ids[0] == IMAGE,
        positions=hf_model.model.get_rope_index(**given)[0][:, 0],
        features=torch.cat(encoded.pooler_output),
        deepstack=torch.stack([torch.cat(features) for features in encoded.deepstack_features]),
    )


@torch.no_grad()
def hf_logits(hf_model: Any, prompt: Prompt, answer: list[int]) -> Array:
    """Logits after the prompt and after each token of an answer, from one call for all of it."""
    arguments = prompt.arguments() | {"input_ids": torch.cat([prompt.input_ids, torch.tensor([answer])], dim=1)}
    if "mm_token_type_ids" in arguments:
        arguments["mm_token_type_ids"] = (arguments["input_ids"] == IMAGE).int()
    hf_model.model.rope_deltas = None
    logits: Array = hf_model(**arguments, use_cache=False).logits[0, -len(answer) - 1 :].numpy()
    return logits


def generate_greedily(
    hf_model: Any, arguments: Mapping[str, torch.Tensor], max_tokens: int
) -> tuple[list[int], NDArray[np.float32]]:
    """Tokens and logits of Hugging Face's `generate`, exactly so many."""
    found = hf_model.generate(
        **arguments,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = [int(token_id) for token_id in found.sequences[0, arguments["input_ids"].shape[1] :]]
    return tokens, torch.cat(found.logits).numpy()


def hf_greedy(hf_model: Any, prompt: Prompt, max_tokens: int) -> tuple[list[int], Array]:
    """The same for a prompt, whose positions are its own."""
    hf_model.model.rope_deltas = None
    return generate_greedily(hf_model, prompt.arguments(), max_tokens)
