"""POP in PyTorch, on transformers' own model, attention and cache: what every engine is checked against."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.big_modeling import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.export.boundary import ContextRows, TwoStepTail
from pop_engine.builder.export.calibrated_tail import CalibratedTail
from pop_engine.builder.export.model import TORCH_DTYPES, canonical_names, decoder_layers, make_model
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, DType
from pop_engine.configs.prune_plan import PrunePlan

# What a Hugging Face model takes beside a prompt's tokens. Some classes take a number for each token too, [1, N], by a
# name of their own, which is not 0 where an image's are.
ImageArguments = Mapping[str, torch.Tensor]
NO_IMAGES: ImageArguments = {}
_TOKEN_TYPES = frozenset({"mm_token_type_ids", "token_type_ids"})


@dataclass(frozen=True)
class Reference:
    """A model, its plan, and how the tail's context rows are projected: as the model does, or calibrated."""

    model: PreTrainedModel
    plan: PrunePlan
    context_rows: ContextRows = nullcontext


def load_reference(config: PretrainedConfig, layout: WeightLayout, engine: Path, plan: PrunePlan) -> Reference:
    """The model with the engine's own weight files mapped into it, so that they are not held a second time."""
    tensors: dict[str, torch.Tensor] = {}
    calibrated: dict[str, nn.Parameter] = {}
    for file, entries in layout.by_file().items():
        with safe_open(layout.path(engine, file), framework="pt") as reader:
            for name, entry in entries.items():
                own_name = layout.mode == "copy" or file == CALIBRATED_WEIGHTS
                tensors[name] = reader.get_tensor(name if own_name else entry.stored_name)
                if file == CALIBRATED_WEIGHTS:
                    calibrated[name] = nn.Parameter(tensors[name], requires_grad=False)
    model = assemble_model(config, layout.dtype, tensors)
    if not calibrated:
        return Reference(model, plan)
    return Reference(model, plan, CalibratedTail(model, plan, calibrated).context_rows)


def assemble_model(config: PretrainedConfig, dtype: DType, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """The config's model around tensors under their canonical names, which are not copied."""
    with init_empty_weights(include_buffers=False):
        model = make_model(config, dtype=TORCH_DTYPES[dtype])
    state = {name: tensors[canonical] for name, canonical in canonical_names(model).items()}
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    model.eval()
    return model


@torch.no_grad()
def reference_logits(
    reference: Reference,
    prompt: list[int],
    continuation: list[int],
    boundary_window: int = 1,
    images: ImageArguments = NO_IMAGES,
) -> torch.Tensor:
    """The paper's two-step form, teacher-forced: logits after the prompt, then after each token of `continuation`.

    Returns [1 + len(continuation), vocab_size] in fp32. The prompt's last tokens, one in the paper, are the first
    decode step (PAPER.md, Method); its images end before them. The model is left as it was.
    """
    model = reference.model
    cache = DynamicCache(config=model.config)
    if context := prompt[:-boundary_window]:
        pruned_prefill(reference, context, cache, images)
    steps = [prompt[-boundary_window:], *([token] for token in continuation)]
    logits = [
        model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, -1].float() for tokens in steps
    ]
    return torch.stack(logits)


@torch.no_grad()
def image_features(reference: Reference, prompt: list[int], images: ImageArguments) -> torch.Tensor:
    """Features of a prompt's images, [tokens, hidden_size] in fp32, as the model puts them among its embeddings."""
    given: list[torch.Tensor] = []
    decoder = reference.model.get_decoder()

    def keep(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, torch.Tensor]) -> None:
        given.append(kwargs["inputs_embeds"])

    with decoder.register_forward_pre_hook(keep, with_kwargs=True):
        reference.model(input_ids=torch.tensor([prompt]), **images, use_cache=False, logits_to_keep=1)
    return given[0][0, torch.tensor(prompt) == reference.model.config.image_token_id].float()


@torch.no_grad()
def pruned_prefill(
    reference: Reference, context: list[int], cache: DynamicCache, images: ImageArguments = NO_IMAGES
) -> None:
    """Fill a cache as the pruned prefill does. The model is left as it was."""
    model = reference.model
    layers = decoder_layers(model)
    # One for each token of the prompt, which may be longer than the context.
    own = {name: value[:, : len(context)] if name in _TOKEN_TYPES else value for name, value in images.items()}
    tail = [layers[layer_idx] for layer_idx in reference.plan.tail]
    TwoStepTail(reference.context_rows).wrap(tail)
    try:
        model(input_ids=torch.tensor([context]), **own, cache=cache, use_cache=True, logits_to_keep=1)
    finally:
        for layer in tail:
            del layer.forward
