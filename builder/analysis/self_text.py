"""Text sampled from the model itself, for who has none of the kind that the model will read."""

import hashlib
from collections.abc import Callable

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, Corpus, CorpusSize, make_corpus
from pop_engine.configs.errors import UsageError

SELF = "self"
# Sequences at once: a step over sixteen costs little more than a step over one.
_BATCH_SIZE = 16


def self_corpus(model: PreTrainedModel, size: CorpusSize, seed: int, progress: Callable[[int, int], None]) -> Corpus:
    """Sample documents at temperature 1 from the model's first token on, and divide them.

    The same seed gives the same text on the same machine. Raises UsageError where the model has no first token.
    """
    prefix = (first_token(model.config),)
    num_tokens = min(size.context_len, size.max_len or size.context_len) + CONTINUATION_LEN
    num_documents = -(-size.num_tokens // num_tokens) + size.num_held_out
    generator = torch.Generator().manual_seed(seed)
    documents: list[list[int]] = []
    while len(documents) < num_documents:
        count = min(_BATCH_SIZE, num_documents - len(documents))
        documents += sample_continuations(model, torch.full((count, 1), prefix[0]), num_tokens, generator)
        progress(len(documents), num_documents)
    digest = hashlib.sha256(str(documents).encode()).hexdigest()
    return make_corpus(SELF, digest, documents, prefix, size)


def first_token(model_config: PretrainedConfig) -> int:
    """What the model's own text begins with. Raises UsageError where there is no such token."""
    config = model_config.get_text_config(decoder=True)
    for token in (config.bos_token_id, config.eos_token_id):
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    raise UsageError("--data self: the model has no bos or eos token to begin with; give --data FILE.txt")


@torch.no_grad()
def sample_continuations(
    model: PreTrainedModel, tokens: torch.Tensor, num_tokens: int, generator: torch.Generator
) -> list[list[int]]:
    """What the model says after each of some prompts of one length, [B, N], at temperature 1: [B, num_tokens]."""
    cache = DynamicCache(config=model.config)
    sampled: list[torch.Tensor] = []
    for _ in range(num_tokens):
        logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        tokens = torch.multinomial(logits.float().softmax(-1), 1, generator=generator)
        sampled.append(tokens)
    documents: list[list[int]] = torch.cat(sampled, dim=1).tolist()
    return documents
