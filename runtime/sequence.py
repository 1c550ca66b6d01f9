"""One sequence being generated: its slot, its sampler, its text, and how it ends."""

import time
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pop_engine.runtime.sampling import SampledToken, Sampler, SamplingParams
from pop_engine.runtime.text_stream import TextStream
from pop_engine.runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Piece:
    """What one step adds: a token, and the text that is now safe to show (often, but not always, the token's)."""

    text: str
    token: SampledToken


@dataclass(frozen=True)
class Metrics:
    """What a generation cost.

    `ttft_ms` runs from the prompt's tokens to the first sampled token, waiting for a slot included; `tpot_ms` is the
    mean time of each token after that, 0 where there is none.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Generation:
    """A finished answer. `logprobs` has one entry per token where they were asked for, and is empty otherwise."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: Metrics
    logprobs: tuple[SampledToken, ...] = ()


class Sequence:
    """Turns logits into pieces until a stop token, a stop string, `max_tokens`, or the end of the slot."""

    def __init__(
        self,
        prompt_token_ids: TokenSequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        max_seq_len: int,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._sampler = Sampler(params, prompt_token_ids)
        self._text = None if tokenizer is None else TextStream(tokenizer, params.stop)
        self._eos_token_ids = frozenset() if tokenizer is None or params.ignore_eos else tokenizer.eos_token_ids
        # The last token may be sampled without room to write it: it is never run through the model.
        room = max_seq_len - len(prompt_token_ids) + 1
        self._max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._tokens: list[SampledToken] = []
        self._pieces: list[str] = []
        self._started = time.perf_counter()
        self._first = self._last = self._started

    @property
    def last_token_id(self) -> int:
        """The token that the next decode step runs."""
        return self._tokens[-1].token_id

    def accept(self, logits: NDArray[np.float32]) -> Piece:
        """Sample from logits [vocab_size], note the token, and decide whether the sequence is finished."""
        token = self._sampler.sample(logits)
        self._last = time.perf_counter()
        if not self._tokens:
            self._first = self._last
        self._tokens.append(token)
        text = self._show(token.token_id)
        if text:
            self._pieces.append(text)
        return Piece(text, token)

    def _show(self, token_id: int) -> str:
        if token_id in self._eos_token_ids:
            self.finish_reason = "stop"
            return self._flush()
        text = "" if self._text is None else self._text.push(token_id)
        if self._text is not None and self._text.stopped:
            self.finish_reason = "stop"
        elif len(self._tokens) >= self._max_tokens:
            self.finish_reason = "length"
            text += self._flush()
        return text

    def _flush(self) -> str:
        if self._text is None:
            return ""
        text = self._text.flush()
        if self._text.stopped:
            self.finish_reason = "stop"
        return text

    def result(self) -> Generation:
        """The finished answer."""
        assert self.finish_reason is not None
        num_later = len(self._tokens) - 1
        return Generation(
            text="".join(self._pieces),
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=self.finish_reason,
            metrics=Metrics(
                num_prompt_tokens=len(self.prompt_token_ids),
                num_output_tokens=len(self._tokens),
                ttft_ms=(self._first - self._started) * 1e3,
                tpot_ms=(self._last - self._first) * 1e3 / num_later if num_later else 0.0,
            ),
            logprobs=() if self._params.logprobs is None else tuple(self._tokens),
        )
