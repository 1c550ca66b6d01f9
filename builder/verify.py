"""Check a finished engine against the PyTorch reference, on the real weights."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from pop_engine.builder.checkpoint.layout import WeightLayout
from pop_engine.builder.export.families.registry import vision_family
from pop_engine.builder.reference import (
    NO_IMAGES,
    ImageArguments,
    Reference,
    image_features,
    load_reference,
    reference_logits,
)
from pop_engine.builder.verification_sample import Sample, image_sample, text_sample
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import Manifest, VerificationRecord

# Absolute error of a number that rounding in fp32 explains, and the same for models with large numbers.
TOLERANCE, RELATIVE_TOLERANCE = 1e-3, 5e-5

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class _Difference:
    """Largest errors of one sample, and what is allowed."""

    prefill: float
    decode: float
    tolerance: float
    features: float = 0.0
    num_image_tokens: int = 0


def verify_engine(
    staging: Path, manifest_name: str, manifest: Manifest, config: PretrainedConfig, layout: WeightLayout
) -> VerificationRecord:
    """Run seeded random samples through the engine, in a process of its own, and through the reference.

    Raises EngineError where logits or image features differ by more than rounding: a failed check is a failed build.
    """
    text = text_sample(manifest)
    image = None if manifest.vision is None else image_sample(manifest, manifest.vision)
    replay = _Replay(staging, manifest_name)
    found = [(sample, replay.run(sample)) for sample in (text, image) if sample is not None]
    reference = load_reference(config, layout, staging, manifest.plan)
    differences = [
        _compare(reference, config, staging, sample, *numbers, manifest.boundary_window) for sample, numbers in found
    ]
    return VerificationRecord(
        status="passed",
        num_prompt_tokens=len(text.prompt),
        num_decode_steps=len(text.continuation),
        prefill_max_error=max(difference.prefill for difference in differences),
        decode_max_error=max(difference.decode for difference in differences),
        tolerance=differences[0].tolerance,
        num_image_tokens=differences[-1].num_image_tokens,
        features_max_error=differences[-1].features,
    )


def _compare(
    reference: Reference,
    config: PretrainedConfig,
    engine: Path,
    sample: Sample,
    logits: Floats,
    features: Floats | None,
    boundary_window: int,
) -> _Difference:
    prompt, images = _model_arguments(config, engine, sample)
    expected = reference_logits(reference, prompt, sample.continuation, boundary_window, images).numpy()
    errors, tolerance = _errors("logits", logits, expected)
    prefill, decode = float(errors[0]), float(errors[1:].max(initial=0.0))
    if features is None:
        return _Difference(prefill, decode, tolerance)
    feature_errors, _ = _errors("image features", features, image_features(reference, prompt, images).numpy())
    return _Difference(prefill, decode, tolerance, float(feature_errors.max()), len(features))


def _errors(what: str, found: Floats, expected: Floats) -> tuple[Floats, float]:
    """The largest error of each row, and what is allowed. Raises EngineError where one is larger."""
    tolerance = max(TOLERANCE, RELATIVE_TOLERANCE * float(np.abs(expected).max()))
    if found.shape != expected.shape:
        raise EngineError(f"verification failed: {what} of shape {found.shape}, PyTorch makes {expected.shape}")
    errors: Floats = np.abs(found - expected).max(axis=1)
    if not np.isfinite(found).all() or errors.max() > tolerance:
        raise EngineError(
            f"verification failed: {what} differ from the PyTorch reference by {errors.max():.3g}, expected at most "
            f"{tolerance:.3g}; report it with the model's name, or build with --no-verify to look into it"
        )
    return errors, tolerance


def _model_arguments(config: PretrainedConfig, engine: Path, sample: Sample) -> tuple[list[int], ImageArguments]:
    """The prompt as Hugging Face's own processor gives it to the model; its files lie in the engine directory."""
    family = vision_family(config)
    if sample.image is None or family is None:
        return sample.prompt, NO_IMAGES
    arguments = dict(family.model_inputs(config, engine, sample.prompt, [sample.image]))
    prompt: list[int] = arguments.pop("input_ids")[0].tolist()
    return prompt, arguments


@dataclass(frozen=True)
class _Replay:
    """The engine as a process."""

    staging: Path
    manifest_name: str

    def run(self, sample: Sample) -> tuple[Floats, Floats | None]:
        """Logits [1 + len(continuation), vocab_size], and the image's features [tokens, hidden_size]."""
        with TemporaryDirectory(prefix="pop-verify-") as name:
            folder = Path(name)
            given, written, features = folder / "tokens.json", folder / "logits.npy", folder / "features.npy"
            content: dict[str, object] = {"prompt": sample.prompt, "continuation": sample.continuation}
            if sample.image is not None:
                sample.image.save(folder / "image.png")
                content |= {"images": [str(folder / "image.png")], "features": str(features)}
            given.write_text(json.dumps(content), encoding="utf-8")
            self._start(given, written)
            return np.load(written), np.load(features) if sample.image is not None else None

    def _start(self, given: Path, written: Path) -> None:
        replay = [sys.executable, "-m", "pop_engine.runtime.replay"]
        command = [*replay, str(self.staging), str(given), str(written), "--manifest", self.manifest_name]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode != 0:
            raise EngineError(f"verification failed: the engine does not run ({finished.stderr.strip()})")
