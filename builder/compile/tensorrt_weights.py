"""The weight files as a plan that holds its weights gets them: mapped, and read by TensorRT where they lie."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from pop_engine.builder.compile.plan_job import PlanJob

# The bytes of each parameter, by its name in the graph.
MappedWeights = Mapping[str, NDArray[np.uint8]]
NO_WEIGHTS: MappedWeights = {}


def map_weights(model: ir.Model, job: PlanJob) -> MappedWeights:
    """What the graph's external initializers name in the weight files. Empty where the weights are inputs.

    TensorRT keeps pointers into the mapping, so it must outlive the network.
    """
    files: dict[str, NDArray[np.uint8]] = {}
    found: dict[str, NDArray[np.uint8]] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            file, start = str(tensor.location), tensor.offset or 0
            if file not in files:
                files[file] = np.memmap(job.layout.path(job.out.parent, file), dtype=np.uint8, mode="r")
            found[name] = files[file][start : start + tensor.nbytes]
    return found
