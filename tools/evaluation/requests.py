"""What an evaluation harness asks of an engine, in the harness's terms and without the harness.

The context is prefilled with POP and the continuation goes through decode, as it does when the engine serves.
"""

from collections.abc import Iterator, Mapping, Sequence

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.engine import Engine
from pop_engine.runtime.sampling import SamplingParams
from pop_engine.tools.evaluation.likelihood import answer_likelihood
from pop_engine.tools.evaluation.message import Case

DEFAULT_MAX_TOKENS = 256
_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")


def token_likelihoods(engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """Log-likelihood of each (context, continuation), and whether greedy decoding would give the continuation.

    A context that does not fit loses its beginning, as in the harness's own models. Raises UsageError where a
    continuation alone does not fit, and where either is empty.
    """
    max_seq_len = engine.manifest.limits.max_seq_len
    return answer_likelihood(engine, [_fit(context, continuation, max_seq_len) for context, continuation in pairs])


def _fit(context: Sequence[int], continuation: Sequence[int], max_seq_len: int) -> Case:
    # The continuation's last token is scored and never run.
    room = max_seq_len - (len(continuation) - 1)
    if not context or not continuation:
        raise UsageError(f"request of {len(context)} context tokens and {len(continuation)} to score; expected some")
    if room < 1:
        raise UsageError(
            f"continuation of {len(continuation)} tokens: the engine holds max_seq_len {max_seq_len}; "
            "build with a higher --max-seq-len"
        )
    return Case(tuple(context[-room:]), tuple(continuation))


def rolling_windows(
    token_ids: Sequence[int], prefix_token_id: int, max_len: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Cut a text into (context, continuation) pairs in which every token is a continuation's once.

    The first context is the prefix; a later one is what fits before its continuation (lm_eval/api/model.py,
    loglikelihood_rolling).
    """
    if token_ids:
        yield [prefix_token_id], token_ids[:max_len]
    for start in range(max_len, len(token_ids), max_len):
        end = min(start + max_len, len(token_ids))
        yield token_ids[end - max_len - 1 : start], token_ids[start:end]


def text_likelihood(engine: Engine, token_ids: Sequence[int], prefix_token_id: int) -> float:
    """Log-likelihood of a whole text, in windows of what a slot holds."""
    windows = list(rolling_windows(token_ids, prefix_token_id, engine.manifest.limits.max_seq_len))
    return sum(total for total, _ in token_likelihoods(engine, windows))


def generate_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[str]:  # fmt: skip
    """Complete all prompts, batched over the slots. One that leaves no room for its answer loses its beginning."""
    max_seq_len = engine.manifest.limits.max_seq_len
    cut = []
    for prompt, own in zip(prompts, params, strict=True):
        room = max_seq_len - (own.max_tokens or 1)
        if room < 1:
            raise UsageError(
                f"max_gen_toks {own.max_tokens}: the engine holds max_seq_len {max_seq_len}; give less, or build with "
                "a higher --max-seq-len"
            )
        cut.append(prompt[-room:])
    texts: dict[int, str] = {}
    for event in engine.run_batch(cut, params):
        if event.result is not None:
            texts[event.index] = event.result.text
    return [texts[index] for index in range(len(cut))]


def sampling_params(settings: Mapping[str, object]) -> SamplingParams:
    """The harness's generation settings as ours. Raises UsageError on one that this engine does not have."""
    left = dict(settings)
    until = left.pop("until", None)
    stops = [until] if isinstance(until, str) else list(until) if isinstance(until, list | tuple) else []
    given = [left.pop(name, None) for name in _MAX_TOKENS_NAMES]
    max_tokens = next((value for value in given if value is not None), DEFAULT_MAX_TOKENS)
    do_sample = left.pop("do_sample", None)
    sampling = {name: left.pop(name) for name in _SAMPLING_NAMES if left.get(name) is not None}
    if do_sample is False or (do_sample is None and "temperature" not in sampling):
        sampling["temperature"] = 0.0
    elif do_sample and "temperature" not in sampling:
        sampling["temperature"] = 1.0
    if unknown := [name for name, value in left.items() if value is not None]:
        known = ", ".join(["until", _MAX_TOKENS_NAMES[0], "do_sample", *_SAMPLING_NAMES])
        raise UsageError(f"gen_kwargs {unknown[0]}: this engine has no such setting; it has {known}")
    return SamplingParams(
        max_tokens=max_tokens, stop=tuple(text for text in stops if text), **sampling  # type: ignore[arg-type]
    )  # fmt: skip
