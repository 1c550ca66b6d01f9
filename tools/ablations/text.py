"""The text that some ablations are fitted on, in tokens."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pop_engine.builder.analysis.calibrate import CalibrationOptions, calibration_corpus
from pop_engine.builder.checkpoint.checkpoint import Checkpoint
from pop_engine.builder.progress import StepProgress

DEFAULT_NUM_TOKENS = CalibrationOptions.num_tokens
# A baseline reads its text in one call, which holds every activation of a layer: 2 GB for a model of 1B.
MAX_BASELINE_TOKENS = 16_000


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
    progress: StepProgress,
) -> FitText:
    """About `num_tokens` tokens, 16,000 at most, of a file or of the model's own text, cut as for calibration.

    Raises UsageError where the file cannot be read, or has too little text.
    """
    options = CalibrationOptions(data, min(num_tokens, MAX_BASELINE_TOKENS), num_held_out=1)
    corpus = calibration_corpus(checkpoint, model, options, progress)
    pieces = [piece.token_ids for piece in corpus.fit]
    longest = max(map(len, pieces))
    # A batch has no padding: ends of documents are left out.
    whole = torch.tensor([piece for piece in pieces if len(piece) == longest])
    return FitText(corpus.name, corpus.sha256, whole)
