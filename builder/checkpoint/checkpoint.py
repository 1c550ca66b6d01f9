"""What every checkpoint offers, whatever its files are."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedConfig

from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import ModelSource, TokenizerRecord


@dataclass(frozen=True)
class StoredTensor(ABC):
    """One tensor of a checkpoint under its Hugging Face name. `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    num_bytes: int

    @abstractmethod
    def read(self) -> torch.Tensor:
        """Read this one tensor from disk, in floating point. Raises EngineError where the file is damaged."""

    def read_bytes(self) -> bytearray:
        """The tensor's bytes as they are stored. Raises EngineError where the file is shorter than it was."""
        # A plain read and not a memory map: mapped pages would count as the build's resident memory.
        content = bytearray(self.num_bytes)
        with self.file.open("rb") as file:
            file.seek(self.offset)
            num_read = file.readinto(content)
        if num_read != self.num_bytes:
            raise EngineError(
                f"{self.file}: tensor {self.name} ends after {num_read} of {self.num_bytes} bytes; fetch the file again"
            )
        return content


class Checkpoint(Protocol):
    """A model's config, weights and tokenizer. `tensors` is None where there are no weights to read."""

    @property
    def source(self) -> ModelSource:
        """Where it came from."""

    @property
    def options(self) -> BuildOptions:
        """The preset's options; nothing set where the model is no preset."""

    @property
    def hf_config(self) -> PreTrainedConfig:
        """The model's config as transformers understands it."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor] | None:
        """Every stored tensor by name; nothing is read until one is asked for."""

    @property
    def processor_folder(self) -> Path | None:
        """Where the files of an image processor would lie; None where the checkpoint is no folder."""

    def save_tokenizer(self, directory: Path) -> TokenizerRecord | None:
        """Write tokenizer.json into a folder; None where the checkpoint has no tokenizer."""
