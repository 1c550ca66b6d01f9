"""Check a finished engine against the PyTorch reference, on the real weights."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.reference import load_reference, reference_logits
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Manifest, VerificationRecord

NUM_PROMPT_TOKENS = 80
NUM_DECODE_STEPS = 4
# Absolute error of a logit that rounding in fp32 explains, and the same for models with large logits.
TOLERANCE, RELATIVE_TOLERANCE = 1e-3, 5e-5


@dataclass(frozen=True)
class _Tokens:
    prompt: list[int]
    continuation: list[int]


def verify_engine(
    staging: Path, manifest_name: str, manifest: Manifest, config: PretrainedConfig, layout: WeightLayout
) -> VerificationRecord:
    """Run seeded random tokens through the engine, in a process of its own, and through the reference.

    Raises EngineError where the logits differ by more than rounding: a failed check is a failed build.
    """
    window = manifest.boundary_window
    tokens = _draw_tokens(manifest.dims.vocab_size, manifest.limits.max_seq_len, window)
    found = _replay(staging, manifest_name, tokens)
    reference = load_reference(config, layout, staging, manifest.plan)
    expected = reference_logits(reference, tokens.prompt, tokens.continuation, window).numpy()
    errors = np.abs(found - expected).max(axis=1)
    tolerance = max(TOLERANCE, RELATIVE_TOLERANCE * float(np.abs(expected).max()))
    if not np.isfinite(found).all() or errors.max() > tolerance:
        raise EngineError(
            f"verification failed: logits differ from the PyTorch reference by {errors.max():.3g}, expected at most "
            f"{tolerance:.3g}; report it with the model's name, or build with --no-verify to look into it"
        )
    return VerificationRecord(
        status="passed",
        num_prompt_tokens=len(tokens.prompt),
        num_decode_steps=len(tokens.continuation),
        prefill_max_error=float(errors[0]),
        decode_max_error=float(errors[1:].max(initial=0.0)),
        tolerance=tolerance,
    )


def _draw_tokens(vocab_size: int, max_seq_len: int, boundary_window: int) -> _Tokens:
    """A window takes none of the context's tokens away, where the engine has room for both."""
    random = np.random.default_rng(0)
    num_steps = min(NUM_DECODE_STEPS, max_seq_len - 1)
    num_prompt = min(NUM_PROMPT_TOKENS + boundary_window - 1, max_seq_len - num_steps)
    drawn = [int(token) for token in random.integers(0, vocab_size, num_prompt + num_steps)]
    return _Tokens(drawn[:num_prompt], drawn[num_prompt:])


def _replay(staging: Path, manifest_name: str, tokens: _Tokens) -> NDArray[np.float32]:
    given, written = staging / ".verify.json", staging / ".verify.npy"
    given.write_text(json.dumps({"prompt": tokens.prompt, "continuation": tokens.continuation}), encoding="utf-8")
    replay = [sys.executable, "-m", "pop_engine.runtime.replay"]
    command = [*replay, str(staging), str(given), str(written), "--manifest", manifest_name]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise EngineError(f"verification failed: the engine does not run ({finished.stderr.strip()})")
    logits: NDArray[np.float32] = np.load(written)
    given.unlink()
    written.unlink()
    return logits
