"""Every family that is checked: a tiny random model of it, and what is expected of its build."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Two kinds of layers, so that trunk and tail have one of each.
_MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_WINDOW = {"sliding_window": 8}
_MIXED_WINDOWS = {**_WINDOW, "num_hidden_layers": 4, "layer_types": _MIXED}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WIDTHS = ("hidden_size", "head_dim", "global_head_dim", "word_embed_proj_dim")
_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One line of the table. `refused` holds words of the refusal, and is empty where the family works.

    `features` says what the line is there for. `full_prefill` also builds the prefill graph without a tail.
    """

    name: str
    features: str
    options: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    refused: str = ""
    full_prefill: bool = False

    def config(self, *, is_wide: bool = False) -> PretrainedConfig:
        """The tiny config. `is_wide` doubles the size of heads: TensorRT has no kernel for heads of 8."""
        options = {**_COMMON, **self.options}
        config: PretrainedConfig = CONFIG_MAPPING[self.model_type or self.name](
            **(_widen(options) if is_wide else options)
        )
        return config


def _widen(options: dict[str, Any]) -> dict[str, Any]:
    wide = {name: 2 * options[name] for name in _WIDTHS if name in options}
    if any(isinstance(value, list) for value in options.get("rope_parameters", {}).values()):
        # A factor for each pair of a head.
        rope = {
            name: 2 * value if isinstance(value, list) else value for name, value in options["rope_parameters"].items()
        }
        wide["rope_parameters"] = rope
    return {**options, **wide}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

WORKING = (
    Family("llama", "grouped-query attention", full_prefill=True),
    Family("llama-tied", "tied embeddings, biases", {"tie_word_embeddings": True, "attention_bias": True}, "llama"),
    Family("llama-llama3", "llama3 rotary scaling", _rope("llama3", **_LLAMA3), "llama"),
    Family("llama-linear", "linear rotary scaling", _rope("linear", factor=2.0), "llama"),
    Family("llama-yarn", "yarn rotary scaling", _rope("yarn", **_YARN), "llama"),
    Family("llama-dynamic", "dynamic rotary scaling, below its threshold", _rope("dynamic", factor=2.0), "llama"),
    Family("mistral", "window on every layer", _WINDOW),
    Family("ministral", "windows on some layers", {**_MIXED_WINDOWS, "head_dim": 16}),
    Family("ministral3", "query scaling by position", {"head_dim": 16}),
    Family("qwen2", "Q, K and V biases"),
    Family("qwen3", "QK-norm, head size of its own", {"head_dim": 16}),
    Family("qwen3_moe", "experts, QK-norm", {"head_dim": 16, **_EXPERTS}),
    Family("gemma", "scaled embeddings, multi-query", {"head_dim": 16, "num_key_value_heads": 1}),
    Family("gemma2", "attention and logit soft-caps, post-norms, windows", {**_MIXED_WINDOWS, "head_dim": 16}),
    Family("gemma3_text", "two rotary bases, QK-norm, windows", {**_MIXED_WINDOWS, "head_dim": 16}, full_prefill=True),
    Family("phi", "parallel block, partial rotary, biases"),
    Family("phi3", "fused projections", _WINDOW),
    Family("phi4-mini", "partial rotary, fused projections", {"partial_rotary_factor": 0.5}, "phi3"),
    Family("phi3-longrope", "longrope, below its threshold",
           {**_rope("longrope", **_LONGROPE), "original_max_position_embeddings": 64}, "phi3"),
    Family("olmo", "norms without weights"),
    Family("olmo2", "post-norms, QK-norm over all heads"),
    Family("olmo3", "windows, post-norms", _MIXED_WINDOWS),
    Family("granite", "embedding, residual, attention and logit multipliers",
           {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
            "logits_scaling": 2.0}),
    Family("smollm3", "layers without rotary", {"num_hidden_layers": 4}),
    Family("cohere", "parallel block, interleaved rotary, QK-norm", {"use_qk_norm": True}),
    Family("cohere2", "windows with rotary, full layers without", _MIXED_WINDOWS),
    Family("starcoder2", "LayerNorm, biases, window", _WINDOW),
    Family("stablelm", "partial rotary, parallel block", {"use_parallel_residual": True}),
    Family("gpt_neox", "fused QKV, parallel block, partial rotary"),
    Family("gpt2", "learned positions, Conv1D weights", full_prefill=True),
    Family("gpt_bigcode", "multi-query, learned positions"),
    Family("opt", "learned positions with an offset", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("exaone4", "post-norms, QK-norm, windows", _MIXED_WINDOWS),
    Family("glm", "interleaved partial rotary", {"head_dim": 16}),
    Family("glm4", "interleaved partial rotary, post-norms", {"head_dim": 16}),
    Family("nemotron", "squared ReLU, LayerNorm1p, partial rotary"),
    Family("ernie4_5", "interleaved rotary", {"head_dim": 16}),
    Family("seed_oss", "biases", {"head_dim": 16}),
    Family("apertus", "xIELU, QK-norm"),
    Family("hunyuan_v1_dense", "QK-norm after rotary", {"head_dim": 16}),
    Family("helium", "interleaved rotary", {"head_dim": 8}),
    Family("arcee", "squared ReLU"),
    Family("mixtral", "experts", {"num_local_experts": 4}, full_prefill=True),
    Family("olmoe", "experts, QK-norm", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    Family("qwen2_moe", "experts, a shared expert, a mask that no layer uses",
           {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    Family("granitemoe", "experts, multipliers", {"num_local_experts": 4}),
    Family("gemma4_text", "heads of two sizes, windows",
           {**_WINDOW, "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0}),
    Family("gpt_oss", "attention sinks, experts with a clamped gate, windows, yarn",
           {**_MIXED_WINDOWS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}, full_prefill=True),
)  # fmt: skip

REFUSED = (
    Family("phi3-longrope-past", "longrope, past its threshold",
           {**_rope("longrope", **_LONGROPE), "original_max_position_embeddings": 16}, "phi3",
           refused="--max-seq-len 48: longrope rotary scaling changes beyond 16 tokens"),
    Family("gemma4-shared", "layers that share K and V",
           {**_WINDOW, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2},
           "gemma4_text", refused="computes with its attention mask"),
    Family("falcon", "attention of its own", refused="attention of its own"),
    Family("bloom", "ALiBi", refused="takes no position_ids"),
    Family("mpt", "ALiBi", refused="takes no position_ids"),
    Family("llama4_text", "chunked attention", {"head_dim": 8, "attention_chunk_size": 8}, refused="has chunks"),
    Family("deepseek_v2", "latent attention", {"n_routed_experts": 4, "num_experts_per_tok": 2},
           refused="only K and V heads of one size"),
    Family("bert", "bidirectional attention", refused="not causal"),
    Family("mamba", "state space", refused="mamba has state-space"),
    Family("jamba", "hybrid", refused="jamba has state-space"),
    Family("qwen3_next", "hybrid", refused="qwen3_next has state-space"),
    Family("rwkv", "recurrent", refused="rwkv has state-space"),
    Family("bart", "encoder-decoder", refused="bart is an encoder-decoder model"),
    Family("t5", "encoder-decoder", refused="t5 is an encoder-decoder model"),
)  # fmt: skip

FAMILIES = {family.name: family for family in (*WORKING, *REFUSED)}
