"""What the virtual gates' samples begin with: prompts from a file, or the model's first token."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import tokenizers
import torch
from transformers import PretrainedConfig, PreTrainedModel

from pop_engine.builder.analysis.corpus import read_documents
from pop_engine.builder.analysis.importance import Sample
from pop_engine.builder.analysis.self_text import SELF, first_token, sample_continuations
from pop_engine.builder.export.model import text_config
from pop_engine.configs.errors import UsageError

_Item = TypeVar("_Item")
# Sequences sampled at once: a step over sixteen costs little more than a step over one.
_BATCH_SIZE = 16
# Enough where some are empty; a file may have a hundred thousand.
_TEXTS_PER_SAMPLE = 4
# With one token there is no prefill before the boundary.
_MIN_PROMPT_LEN = 2


@dataclass(frozen=True)
class SampleSize:
    """How many samples, tokens of one (prompt and output), and of these the output's."""

    num_samples: int
    max_len: int
    output_len: int

    @property
    def prompt_len(self) -> int:
        """Tokens of the longest prompt."""
        return self.max_len - self.output_len


@dataclass(frozen=True)
class PromptGroup:
    """Texts of one length to sample from together: the model adds `num_tokens` to each of `given`.

    The first `prompt_len` tokens of the whole are then the prompt. The rest, the output, ends after a stop token.
    """

    given: tuple[tuple[int, ...], ...]
    num_tokens: int
    prompt_len: int
    stop_tokens: frozenset[int]

    def samples(self, model: PreTrainedModel, generator: torch.Generator) -> list[Sample]:
        """One for each text given."""
        sampled = sample_continuations(model, torch.tensor(self.given), self.num_tokens, generator)
        return [self._divide((*given, *tokens)) for given, tokens in zip(self.given, sampled, strict=True)]

    def _divide(self, tokens: tuple[int, ...]) -> Sample:
        output = tokens[self.prompt_len :]
        end = next((index for index, token in enumerate(output, 1) if token in self.stop_tokens), len(output))
        return Sample(tokens[: self.prompt_len], output[:end])


@dataclass(frozen=True)
class Prompts:
    """All of them, and where they came from."""

    name: str
    sha256: str
    groups: tuple[PromptGroup, ...]

    @property
    def num_samples(self) -> int:
        """How many samples they give."""
        return sum(len(group.given) for group in self.groups)


def self_prompts(config: PretrainedConfig, size: SampleSize) -> Prompts:
    """Nothing but the first token: prompt and output are both the model's own, whatever it says."""
    first = (first_token(config),)
    counts = [min(_BATCH_SIZE, size.num_samples - start) for start in range(0, size.num_samples, _BATCH_SIZE)]
    groups = [PromptGroup((first,) * count, size.max_len - 1, size.prompt_len, frozenset()) for count in counts]
    return Prompts(SELF, hashlib.sha256(str(first).encode()).hexdigest(), tuple(groups))


def file_prompts(path: Path, tokenizer: tokenizers.Tokenizer, config: PretrainedConfig, size: SampleSize) -> Prompts:
    """Prompts of a .jsonl file (`text`, or `prompt` without its answer), or pieces of a .txt; long texts give several.

    There may be fewer than wanted. Raises UsageError where there are fewer than two.
    """
    prefix = tuple(tokenizer.encode("").ids)
    room = size.prompt_len - len(prefix)
    texts = _spread(read_documents(path, ("text", "prompt")), _TEXTS_PER_SAMPLE * size.num_samples)
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts] if room > 0 else []
    prompts = [(*prefix, *piece) for tokens in encoded for piece in _cut(tokens, room)]
    prompts = [prompt for prompt in prompts if len(prompt) >= _MIN_PROMPT_LEN]
    if len(prompts) < 2:
        raise UsageError(
            f"--data {path}: {len(prompts)} prompts of {_MIN_PROMPT_LEN} to {size.prompt_len} tokens; "
            "expected two or more, some hundred are better"
        )
    # By length, so that many can be sampled from at once.
    chosen = sorted(_spread(prompts, size.num_samples), key=len)
    groups = tuple(_groups(chosen, size.output_len, _stop_tokens(config)))
    return Prompts(path.name, hashlib.sha256(path.read_bytes()).hexdigest(), groups)


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """That many, or all, from everywhere in a list."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _cut(tokens: list[int], length: int) -> Iterator[list[int]]:
    """The first tokens of a text, and then only whole pieces."""
    for start in range(0, len(tokens), length):
        if start == 0 or start + length <= len(tokens):
            yield tokens[start : start + length]


def _groups(prompts: list[tuple[int, ...]], output_len: int, stops: frozenset[int]) -> Iterator[PromptGroup]:
    for length, same in groupby(prompts, key=len):
        given = tuple(same)
        for start in range(0, len(given), _BATCH_SIZE):
            yield PromptGroup(given[start : start + _BATCH_SIZE], output_len, length, stops)


def _stop_tokens(config: PretrainedConfig) -> frozenset[int]:
    stops = text_config(config).eos_token_id
    return frozenset() if stops is None else frozenset(stops if isinstance(stops, list) else [stops])
