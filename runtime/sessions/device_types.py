"""How many bytes the items of a contract's dtypes have, and 16-bit logits as fp32."""

import numpy as np
from numpy.typing import NDArray

ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "bool": 1}


def as_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The numbers that these bytes hold, copied. NumPy has no bf16: it is the upper half of an fp32."""
    if dtype == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if dtype == "fp16" else np.float32).astype(np.float32)
