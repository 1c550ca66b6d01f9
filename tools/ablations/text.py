"""The text that some ablations are fitted on, in tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.corpus import CONTINUATION_LEN, CorpusSize, load_tokenizer, text_corpus
from pop_engine.builder.analysis.self_text import SELF, self_corpus
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.export.model import model_dims

DEFAULT_NUM_TOKENS = 33_000
# A baseline reads its text in one call, which holds every activation of a layer: 2 GB for a model of 1B.
MAX_BASELINE_TOKENS = 16_000
# As in calibration; a model that was trained for less reads shorter pieces.
_CONTEXT_LEN = 512
_SEED = 0


@dataclass(frozen=True)
class FitText:
    """Pieces of one length, [B, S], and where they come from."""

    name: str
    sha256: str
    token_ids: torch.Tensor


def fit_text(
    data: str,
    num_tokens: int,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    progress: Callable[[int, int], None],
) -> FitText:
    """About `num_tokens` tokens, 16,000 at most, of a file or of the model's own text, cut as for calibration.

    Raises UsageError where the file cannot be read, or has too little text.
    """
    longest_context = model_dims(checkpoint.hf_config).max_position_embeddings - CONTINUATION_LEN - 2
    context_len = min(_CONTEXT_LEN, longest_context)
    size = CorpusSize(min(num_tokens, MAX_BASELINE_TOKENS), num_held_out=1, context_len=context_len)
    if data == SELF:
        corpus = self_corpus(model, size, _SEED, progress)
    else:
        corpus = text_corpus(Path(data), load_tokenizer(checkpoint), size)
    pieces = [piece.token_ids for piece in corpus.fit]
    longest = max(map(len, pieces))
    # A batch has no padding: ends of documents are left out.
    whole = torch.tensor([piece for piece in pieces if len(piece) == longest])
    return FitText(corpus.name, corpus.sha256, whole)
