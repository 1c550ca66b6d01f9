"""What a graph of a model with images takes beside the tokens, for calls with images and for those without."""

from math import prod

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.io_contract import Binding, GraphContract
from pop_engine.runtime.sessions.session import ImageRows


class ImageBindings:
    """Fills a graph's image inputs. Text rows take zeros: one block of them serves calls of every shape."""

    def __init__(self, contract: GraphContract) -> None:
        self._declared = {binding.name: binding for binding in contract.inputs}
        self._zeros = np.zeros(0, np.uint8)

    @classmethod
    def of(cls, contract: GraphContract) -> "ImageBindings | None":
        """The image inputs of a graph; none where it has none, as a text model's."""
        return cls(contract) if io.IMAGE_IDS in contract.names() else None

    def add(self, inputs: dict[str, NDArray[np.generic]], images: ImageRows | None) -> None:
        """Add the image inputs of one call to its token inputs, and give its positions the axes of the graph."""
        shape = inputs[io.INPUT_IDS].shape
        positions = inputs[io.POSITION_IDS] if images is None or images.positions is None else images.positions
        inputs[io.POSITION_IDS] = self._with_axes(positions, shape)
        given = (None, None, None) if images is None else (images.ids, images.embeds, images.deepstack)
        for name, values in zip((io.IMAGE_IDS, io.IMAGE_EMBEDS, io.DEEPSTACK_EMBEDS), given, strict=True):
            if name in self._declared:
                inputs[name] = self._zeros_for(self._declared[name], shape) if values is None else values

    def _with_axes(self, positions: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
        num_axes = self._declared[io.POSITION_IDS].shape[:-2]
        return np.ascontiguousarray(np.broadcast_to(positions, (*map(int, num_axes), *shape)))

    def _zeros_for(self, binding: Binding, shape: tuple[int, ...]) -> NDArray[np.generic]:
        sizes = {io.BATCH: shape[0], io.SEQ: shape[1]}
        full = tuple(size if isinstance(size, int) else sizes[size] for size in binding.shape)
        dtype = np.dtype(np.int64 if binding.dtype == "int64" else np.float32)
        num_bytes = prod(full) * dtype.itemsize
        if num_bytes > self._zeros.size:
            # Never written to, so the system gives it no memory of its own.
            self._zeros = np.zeros(num_bytes, np.uint8)
        return self._zeros[:num_bytes].view(dtype).reshape(full)
