"""Scores of documents' continuations after several lengths of context, for several boundary windows, in one pass."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import DynamicCache

from pop_engine.builder.analysis.benefit import continuation_nll
from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, Piece
from pop_engine.builder.reference import Reference, pruned_prefill


@dataclass(frozen=True)
class ContinuationScore:
    """What the full model says of a continuation behind a prefilled context: nats a token, and its first choices."""

    nll: float
    choices: tuple[int, ...]


# By length of context and boundary window.
Scores = dict[tuple[int, int], ContinuationScore]


@dataclass(frozen=True)
class DocumentScorer:
    """The documents' tokens, without the `prefix` that every text of the model has, and what they are scored at."""

    prefix: tuple[int, ...]
    documents: list[list[int]]
    context_lens: tuple[int, ...]

    def scores(
        self, reference: Reference, windows: Sequence[int], progress: Callable[[int, int], None]
    ) -> list[Scores]:
        """What `continuation_nll` computes for each document, length of context and window."""
        found = []
        for done, document in enumerate(self.documents, 1):
            found.append(dict(self._scores(reference, [*self.prefix, *document], windows)))
            progress(done, len(self.documents))
        return found

    def without_context(self, full: Reference) -> dict[int, list[float]]:
        """Nats a token of each document's continuation with nothing before it, by length of the context left out."""
        found: dict[int, list[float]] = {}
        for length in self.context_lens:
            pieces = [self._piece(document, length) for document in self.documents]
            found[length] = [continuation_nll(full, piece, with_context=False) for piece in pieces]
        return found

    def _piece(self, document: list[int], length: int) -> Piece:
        end = length + CONTINUATION_LEN
        return Piece(self.prefix, tuple(document[:length]), tuple(document[length:end]))

    @torch.no_grad()
    def _scores(
        self, reference: Reference, tokens: list[int], windows: Sequence[int]
    ) -> Iterator[tuple[tuple[int, int], ContinuationScore]]:
        """The cache of a pruned prefill begins with that of any shorter one, so each token is prefilled once."""
        cache, done = DynamicCache(config=reference.model.config), 0
        prompts = {length: len(self.prefix) + length for length in self.context_lens}
        ends = {(prompts[length] - window, length, window) for length in self.context_lens for window in windows}
        for end, length, window in sorted(ends):
            if end > done:
                pruned_prefill(reference, tokens[done:end], cache)
                done = end
            rows = tokens[end : prompts[length] + CONTINUATION_LEN]
            logits = _logits(reference, rows[:-1], copy.deepcopy(cache))
            nll = float(functional.cross_entropy(logits, torch.tensor(rows[-CONTINUATION_LEN:])))
            yield (length, window), ContinuationScore(nll, tuple(logits.argmax(-1).tolist()))


def _logits(reference: Reference, rows: list[int], cache: DynamicCache) -> torch.Tensor:
    ids = torch.tensor([rows])
    output = reference.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=CONTINUATION_LEN)
    logits: torch.Tensor = output.logits[0].float()
    return logits
