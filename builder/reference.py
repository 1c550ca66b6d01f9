"""POP in PyTorch, on transformers' own model, attention and cache: what every engine is checked against."""

import copy
from pathlib import Path

import torch
from accelerate.big_modeling import init_empty_weights
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.export.boundary import TwoStepTail
from pop_engine.builder.export.model import TORCH_DTYPES, canonical_names, decoder_layers
from pop_engine.configs.prune_plan import PrunePlan


def load_reference_model(config: PretrainedConfig, layout: WeightLayout, weights: Path) -> PreTrainedModel:
    """The model with the engine's own weight files mapped into it, so that they are not held a second time."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=TORCH_DTYPES[layout.dtype]
        )
    tensors: dict[str, torch.Tensor] = {}
    for file, entries in layout.by_file().items():
        with safe_open(weights / file, framework="pt") as reader:
            for name, entry in entries.items():
                tensors[name] = reader.get_tensor(name if layout.mode == "copy" else entry.stored_name)
    state = {name: tensors[canonical] for name, canonical in canonical_names(model).items()}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.eval()
    return model


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel, plan: PrunePlan, prompt: list[int], continuation: list[int]
) -> torch.Tensor:
    """The paper's two-step form, teacher-forced: logits after the prompt, then after each token of `continuation`.

    Returns [1 + len(continuation), vocab_size] in fp32. The prompt's last token is the first decode step (PAPER.md,
    Method). The model is left as it was.
    """
    cache = DynamicCache(config=model.config)
    if len(prompt) > 1:
        _pruned_prefill(model, plan, prompt[:-1], cache)
    steps = [prompt[-1:], *([token] for token in continuation)]
    logits = [
        model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1].float() for tokens in steps
    ]
    return torch.stack(logits)


def _pruned_prefill(model: PreTrainedModel, plan: PrunePlan, context: list[int], cache: DynamicCache) -> None:
    layers = decoder_layers(model)
    tail = [layers[layer_idx] for layer_idx in plan.tail]
    TwoStepTail().wrap(tail)
    try:
        model(input_ids=torch.tensor([context]), cache=cache, use_cache=True, logits_to_keep=1)
    finally:
        for layer in tail:
            del layer.forward
