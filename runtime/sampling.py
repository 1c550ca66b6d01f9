"""How the next token is chosen from one row of logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import EngineError, UsageError

# Below this a float32 division overflows, while two logits that differ at all are already decided.
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """What a caller asks of generation. The defaults are greedy and run until end of text or the engine is full.

    `max_tokens=None` means: until the engine's max_seq_len. `top_k=0` is off. `logprobs` is the number of top
    alternatives to report for each token; 0 reports the chosen token's alone, None computes nothing.
    Raises UsageError on a value outside its range.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, least=1)
        _check_whole("top_k", self.top_k, least=0)
        _check_whole("seed", self.seed, least=0)
        _check_whole("logprobs", self.logprobs, least=0)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise UsageError("top_p 0: expected a number above 0 and up to 1; for greedy use temperature 0")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop {self.stop!r}: expected a tuple of strings, none of them empty")

    @property
    def is_greedy(self) -> bool:
        """True where the most likely token is taken and no random number is drawn."""
        return self.temperature < _GREEDY_BELOW


def _check_whole(name: str, value: int | None, least: int) -> None:
    if value is not None and not (isinstance(value, Integral) and value >= least):
        raise UsageError(f"{name} {value!r}: expected a whole number of at least {least}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # NaN fails the comparison too.
    if not (isinstance(value, Real) and low <= value <= high):
        raise UsageError(f"{name} {value!r}: expected a number from {low:g} to {high:g}")


@dataclass(frozen=True)
class SampledToken:
    """One chosen token. `logprob` is None and `top_logprobs` empty unless SamplingParams.logprobs asks for them.

    `top_logprobs` holds (token id, logprob), the most likely first, ties by token id.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence, one row of logits at a time.

    The steps are those of Hugging Face's `generate`, in its order: repetition penalty over the prompt and what was
    generated, temperature, top_k, top_p, min_p, one draw. Log probabilities are of the distribution after the
    penalty and before temperature and the filters: they say what the model thinks, not how it was sampled.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._rng = np.random.Generator(np.random.PCG64(params.seed))
        self._seen = set(prompt_token_ids) if params.repetition_penalty != 1 else set()
        self._seen_ids: NDArray[np.int64] = np.array(sorted(self._seen), dtype=np.int64)

    def sample(self, logits: NDArray[np.float32]) -> SampledToken:
        """Choose a token from one row, [vocab_size], which is left as it was.

        The token joins those that the repetition penalty looks at. Raises EngineError on NaN or infinite logits.
        """
        _check_finite(logits)
        scores = self._penalised(logits)
        token_id = int(scores.argmax()) if self._params.is_greedy else self._draw(scores)
        self._remember(token_id)
        if self._params.logprobs is None:
            return SampledToken(token_id)
        return _with_logprobs(token_id, scores, self._params.logprobs)

    def _penalised(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        penalty = self._params.repetition_penalty
        if penalty == 1 or not self._seen:
            return logits
        scores = logits.copy()
        seen = scores[self._seen_ids]
        scores[self._seen_ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        return scores

    def _remember(self, token_id: int) -> None:
        if self._params.repetition_penalty != 1 and token_id not in self._seen:
            self._seen.add(token_id)
            self._seen_ids = np.append(self._seen_ids, token_id)

    def _draw(self, scores: NDArray[np.float32]) -> int:
        token_ids, weights = filter_tokens(scores, self._params)
        # Summed in double: over 150,000 tokens a single would swallow the rare ones.
        cumulative = np.cumsum(weights, dtype=np.float64)
        point = self._rng.random() * cumulative[-1]
        return int(token_ids[np.searchsorted(cumulative, point, side="right")])


def filter_tokens(scores: NDArray[np.float32], params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The tokens that temperature, top_k, top_p and min_p leave, by ascending id, and their weights.

    A weight is a token's probability relative to the most likely one's, so at most 1.
    """
    if 0 < params.top_k < scores.size:
        token_ids = _top_ids(scores, params.top_k)
    else:
        token_ids = np.arange(scores.size, dtype=np.int64)
    kept_scores = scores[token_ids]
    weights = np.exp((kept_scores - kept_scores.max()) / np.float32(params.temperature))
    if params.top_p < 1:
        nucleus = _nucleus(weights, params.top_p)
        token_ids, weights = token_ids[nucleus], weights[nucleus]
    if params.min_p > 0:
        likely = weights >= params.min_p
        token_ids, weights = token_ids[likely], weights[likely]
    return token_ids, weights


def _top_ids(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` highest scores, ascending, and of all that tie with the last of them."""
    lowest = np.partition(scores, -count)[-count]
    return np.flatnonzero(scores >= lowest).astype(np.int64, copy=False)


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Positions, ascending, of the smallest set whose share of all the weight reaches top_p."""
    total = float(weights.sum(dtype=np.float64))
    # All tokens below this floor together hold less than 1 - top_p, so the set lies above it: sort only that.
    floor = (1 - top_p) * total / weights.size
    above = np.flatnonzero(weights >= floor)
    by_weight = above[np.argsort(-weights[above], kind="stable")]
    cumulative = np.cumsum(weights[by_weight], dtype=np.float64)
    size = int(np.searchsorted(cumulative, top_p * total)) + 1
    return np.sort(by_weight[:size]).astype(np.int64, copy=False)


def _with_logprobs(token_id: int, scores: NDArray[np.float32], count: int) -> SampledToken:
    peak = float(scores.max())
    log_total = peak + math.log(np.exp(scores - np.float32(peak)).sum(dtype=np.float64))
    top: list[int] = []
    if count:
        candidates = _top_ids(scores, min(count, scores.size))
        top = candidates[np.argsort(-scores[candidates], kind="stable")][:count].tolist()
    top_logprobs = tuple((top_id, float(scores[top_id]) - log_total) for top_id in top)
    return SampledToken(token_id, float(scores[token_id]) - log_total, top_logprobs)


def _check_finite(logits: NDArray[np.float32]) -> None:
    finite = np.isfinite(logits)
    if not finite.all():
        token_id = int(np.flatnonzero(~finite)[0])
        raise EngineError(
            f"logits: {logits[token_id]} for token {token_id}, expected finite numbers; the weights are damaged: "
            "check them with `pop-inspect ENGINE --check` and build the engine again"
        )
