"""An engine as a model of lm-evaluation-harness: `--model pop_engine --model_args engine=DIR`.

Releases of the harness that look for plugins find it by the entry point; before them, run `pop-lm-eval`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.chat_template import ChatMessage
from pop_engine.runtime.engine import Engine
from pop_engine.tools.evaluation.progress import with_progress
from pop_engine.tools.evaluation.requests import generate_texts, sampling_params, text_likelihood, token_likelihoods
from pop_engine.tools.evaluation.text import EvalText

# The harness's Instance, of which only `args` is read.
Request = Any


@register_model("pop_engine")
class PopEngineLM(TemplateLM):  # type: ignore[misc]
    """Likelihoods and generations of one engine.

    `batch_size`, `max_batch_size` and `device` are what the harness passes to every model; an engine has its own.
    """

    def __init__(
        self,
        engine: str,
        threads: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        self._engine = Engine.load(engine, threads=threads)
        manifest = self._engine.manifest
        self._text = EvalText(Path(engine), manifest.tokenizer)
        self._name = manifest.source.name

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._text.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: as in the harness's own models, BOS, or else the end token."""
        return self.eot_token_id if self._text.bos_token_id is None else self._text.bos_token_id

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation."""
        return self._engine.manifest.limits.max_seq_len

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache."""
        return self._name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids. Where it is not said, special tokens are added as the model expects, unless they are there."""
        if add_special_tokens is None:
            add_special_tokens = not self._text.begins_with_bos(string)
        return self._text.encode(string) if add_special_tokens else self._text.encode_plain(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        scores = []
        size = self._engine.manifest.limits.max_batch_size
        for start in with_progress(range(0, len(requests), size), "loglikelihood"):
            group = requests[start : start + size]
            found = token_likelihoods(self._engine, [(context, continuation) for _, context, continuation in group])
            for (texts, _, _), score in zip(group, found, strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, score)
            scores += found
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts."""
        totals = []
        for request in with_progress(requests, "loglikelihood_rolling"):
            tokens = self.tok_encode(request.args[0])
            totals.append(text_likelihood(self._engine, tokens, self.prefix_token_id))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """Completions, each up to its stop texts."""
        texts: list[str] = []
        size = self._engine.manifest.limits.max_batch_size
        for start in with_progress(range(0, len(requests), size), "generate_until"):
            group = requests[start : start + size]
            params = [sampling_params(request.args[1]) for request in group]
            prompts = [self.tok_encode(request.args[0]) for request in group]
            found = generate_texts(self._engine, prompts, params)
            for request, text in zip(group, found, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, text)
            texts += found
        return texts

    def apply_chat_template(self, chat_history: list[ChatMessage], add_generation_prompt: bool = True) -> str:
        """A conversation as the prompt's text."""
        if not add_generation_prompt:
            raise UsageError("apply_chat_template: a begun answer (gen_prefix) is not supported; choose another task")
        return self._text.render_chat(chat_history)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's source, for the harness's records."""
        record = self._engine.manifest.tokenizer
        return record.chat_template if chat_template and record is not None else None
