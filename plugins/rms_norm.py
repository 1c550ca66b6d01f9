"""RMS norm: each row divided by the root of its mean square, then scaled.

No lowering is needed: ONNX Runtime has the standard's operator, and TensorRT's parser spells it out in layers.
Rows and scale are of one type (builder/passes/rms_norm.py).
"""

import numpy as np
from numpy.typing import NDArray

# Of the ONNX standard, from opset 23 on. One input [..., D], a scale [D] and an epsilon.
OP_TYPE = "RMSNormalization"


def reference(rows: NDArray[np.floating], scale: NDArray[np.floating], epsilon: float) -> NDArray[np.floating]:
    """What the operator computes over the last axis, in fp32 up to the scaling (ONNX operator spec, stash_type 1)."""
    wide = rows.astype(np.float32)
    normed = wide / np.sqrt(np.mean(np.square(wide), axis=-1, keepdims=True) + np.float32(epsilon))
    scaled: NDArray[np.floating] = normed.astype(rows.dtype) * scale
    return scaled
