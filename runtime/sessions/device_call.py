"""One call of a graph: what goes in, by name, and the sizes that this gives to the dynamic dimensions."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs import io_contract as io
from pop_engine.configs.errors import EngineError
from pop_engine.configs.io_contract import Binding, GraphContract

Inputs = dict[str, NDArray[np.int64]]

_KNOWN = frozenset({io.INPUT_IDS, io.POSITION_IDS, io.CACHE_LEN, io.CONTEXT_ROWS, io.BOUNDARY_ROWS})


def call_inputs(
    contract: GraphContract, token_ids: NDArray[np.int64], cache_lens: NDArray[np.int64], num_boundary: int
) -> Inputs:
    """Inputs for new tokens [B, S] behind `cache_lens` [B] held ones.

    A graph of the one-pass form has one boundary row, the last. A call without one, a chunk that another follows,
    gives all its rows as context rows all the same: see io_contract.prefill_contract.
    """
    rows = token_ids.shape[1]
    inputs = {
        io.INPUT_IDS: token_ids,
        io.POSITION_IDS: cache_lens[:, None] + np.arange(rows),
        io.CACHE_LEN: cache_lens,
        io.CONTEXT_ROWS: np.arange(rows - num_boundary),
        io.BOUNDARY_ROWS: np.array([rows - 1]),
    }
    names = {binding.name for binding in contract.inputs}
    return {name: np.ascontiguousarray(value, np.int64) for name, value in inputs.items() if name in names}


def dims_of(contract: GraphContract, inputs: Inputs) -> dict[str, int]:
    """Sizes of the contract's dynamic dimensions in a call with these inputs."""
    dims: dict[str, int] = {}
    for binding in contract.inputs:
        if binding.name in inputs:
            sizes = inputs[binding.name].shape
            dims |= {dim: size for dim, size in zip(binding.shape, sizes, strict=True) if isinstance(dim, str)}
    return dims


def shape_of(binding: Binding, dims: Mapping[str, int]) -> tuple[int, ...]:
    """A binding's shape in a call whose dynamic dimensions have these sizes."""
    return tuple(dims[dim] if isinstance(dim, str) else dim for dim in binding.shape)


def small_inputs(contract: GraphContract) -> tuple[Binding, ...]:
    """What a call brings with it: all inputs but caches and weights. Raises EngineError where one is not known here."""
    caches = {binding.alias for binding in contract.outputs}
    small = tuple(binding for binding in contract.inputs if binding.name not in caches)
    for binding in small:
        if binding.name not in _KNOWN:
            raise EngineError(f"input {binding.name}: this target takes text alone; build for ort-cpu")
    return small


def logits_binding(contract: GraphContract) -> Binding | None:
    """The logits, where the graph has any: a two-step prefill graph has none."""
    return next((binding for binding in contract.outputs if binding.name == io.LOGITS), None)
