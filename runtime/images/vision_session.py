"""The vision graph in ONNX Runtime: one image in, the rows of its tokens out."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.graph_record import GraphRecord


@dataclass(frozen=True)
class ImageFeatures:
    """What stands at an image's tokens: [num_tokens, hidden_size], and for each DeepStack layer the same."""

    embeds: NDArray[np.float32]
    deepstack: NDArray[np.float32] | None


class VisionSession:
    """Runs one image at a time and keeps nothing of it, so that memory does not grow with the number of images."""

    def __init__(self, directory: Path, weights: Path, record: GraphRecord, threads: int | None) -> None:
        self._record = record
        path = directory / record.file
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.log_severity_level = 4
        # Images differ in size: an arena would keep the largest one's memory, and a plan of memory for every size.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        # The text session's threads need the cores as soon as this one is done.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights.resolve()))
        try:
            self._session = ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise EngineError(f"{path}: ONNX Runtime {ort.__version__} cannot load it ({error})") from error

    def run(self, inputs: Mapping[str, NDArray[np.generic]]) -> ImageFeatures:
        """Run the graph; for an image of several tiles, where it takes one, once for each, and their tokens in order.

        Inputs that it does not declare are left out.
        """
        pixels = self._record.contract.inputs[0]
        if pixels.shape[0] != 1:
            return self._run_once(inputs)
        return _joined([self._run_once({pixels.name: tile[None]}) for tile in inputs[pixels.name]])

    def _run_once(self, inputs: Mapping[str, NDArray[np.generic]]) -> ImageFeatures:
        contract = self._record.contract
        outputs = [binding.name for binding in contract.outputs]
        taken = {binding.name: inputs[binding.name] for binding in contract.inputs}
        try:
            found = dict(zip(outputs, self._session.run(outputs, taken), strict=True))
        except RuntimeError as error:
            raise EngineError(f"{self._record.file}: ONNX Runtime failed ({error})") from error
        return ImageFeatures(found[io.IMAGE_FEATURES], found.get(io.DEEPSTACK_FEATURES))


def _joined(tiles: list[ImageFeatures]) -> ImageFeatures:
    """The rows of all tiles of one image."""
    if len(tiles) == 1:
        return tiles[0]
    deepstack = [tile.deepstack for tile in tiles if tile.deepstack is not None]
    return ImageFeatures(
        np.concatenate([tile.embeds for tile in tiles]), np.concatenate(deepstack, axis=1) if deepstack else None
    )
