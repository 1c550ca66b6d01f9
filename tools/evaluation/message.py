"""What pop-eval and its workers say to each other, one JSON line each way."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class Case:
    """A prompt and the answer to score after it, in tokens; the answer has at least one."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class ScoreRequest(msgspec.Struct, frozen=True, tag="score"):
    """Score each answer, as many cases as the engine has slots.

    The answers' logits, [all their tokens, vocab_size], are written to one .npy or compared with those of another.
    """

    cases: tuple[Case, ...]
    write_logits: str | None = None
    read_logits: str | None = None


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate"):
    """Answer each prompt greedily."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


class TtftRequest(msgspec.Struct, frozen=True, tag="ttft"):
    """Time one prompt's first token."""

    prompt: tuple[int, ...]


EvalRequest = ScoreRequest | GenerateRequest | TtftRequest


@dataclass(frozen=True)
class AnswerScore:
    """One entry per token of an answer.

    `kl` is the divergence in nats of these logits' distribution from the one compared with, `same_top1` whether both
    have one most likely token; both are empty where nothing was compared.
    """

    logprobs: tuple[float, ...]
    kl: tuple[float, ...] = ()
    same_top1: tuple[bool, ...] = ()


@dataclass(frozen=True)
class GreedyAnswer:
    """What the engine says by itself. `token_ids` includes the end token where one came."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class ScoreReply:
    """Scores by case."""

    scores: tuple[AnswerScore, ...]
    peak_memory_bytes: int


@dataclass(frozen=True)
class GenerateReply:
    """Answers by prompt."""

    answers: tuple[GreedyAnswer, ...]
    peak_memory_bytes: int


@dataclass(frozen=True)
class TtftReply:
    """Wall time from the prompt's tokens to the first answer token."""

    ttft_ms: float
    peak_memory_bytes: int
