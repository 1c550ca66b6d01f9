"""The attention that a vision tower is traced with: one operator, registered with transformers like any other."""

import torch
from transformers.modeling_utils import AttentionInterface

from pop_engine.configs.errors import EngineError
from pop_engine.plugins import full_attention as full_attention_op

IMPLEMENTATION = "pop_engine_full"


def register_full_attention() -> None:
    """Make `attn_implementation="pop_engine_full"` mean: every row attends to every row of the call."""

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Query, key and value [B, H, rows, D]; returns [B, rows, H, D] as transformers expects."""
        if attention_mask is not None or query.shape[1] != key.shape[1]:
            raise EngineError(
                f"{type(module).__name__}: attention with a mask or with grouped heads cannot be exported"
            )
        rows = [heads.transpose(1, 2) for heads in (query, key, value)]
        output = torch.onnx.ops.symbolic(
            f"{full_attention_op.DOMAIN}::{full_attention_op.OP_TYPE}",
            tuple(rows),
            {"scale": float(query.shape[-1] ** -0.5 if scaling is None else scaling)},
            dtype=query.dtype,
            shape=rows[0].shape,
            version=full_attention_op.VERSION,
        )
        return output, None

    AttentionInterface.register(IMPLEMENTATION, attend)
