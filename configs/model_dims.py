"""The few numbers about a model that both sides of an engine directory need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDims:
    """Dimensions under their Hugging Face config names."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
