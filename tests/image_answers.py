"""What the tests of every family with images do alike: answers of Hugging Face's, and of an engine."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from engine_kit import taken_slots
from pop_engine.runtime import Engine
from vision_engine_kit import as_png


class ImagePrompt(Protocol):
    """A prompt of one of the families' kits."""

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def images(self) -> tuple[Image.Image, ...]: ...


@contextmanager
def unpruned(engine: Engine) -> Iterator[Engine]:
    """Within it, every token of a prompt goes through the tail in full: the full model's numbers."""
    manifest = engine.manifest
    engine.manifest = dataclasses.replace(manifest, boundary_window=manifest.limits.max_seq_len)
    try:
        yield engine
    finally:
        engine.manifest = manifest


def logits_of(engine: Engine, prompt: ImagePrompt, answer: Sequence[int]) -> NDArray[np.float32]:
    """Logits after the prompt and after each token of an answer."""
    with taken_slots(engine, 1) as (slot,):
        rows = [engine.prefill(slot, engine.encode_images(prompt.token_ids, list(map(as_png, prompt.images))))]
        return np.stack(rows + [engine.decode_step([slot], [token])[0] for token in answer])


def write_settings(processor: Any, folder: Path, changes: Mapping[str, object]) -> Path:
    """A processor's file, with these changes."""
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return folder
