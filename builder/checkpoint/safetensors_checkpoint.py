"""A checkpoint folder as the hub has them: config.json, one or many safetensors files, a tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from pop_engine.builder.checkpoint.checkpoint import StoredTensor
from pop_engine.builder.checkpoint.converted_tensors import with_converted_tensors
from pop_engine.builder.checkpoint.model_config import read_model_config
from pop_engine.builder.checkpoint.safetensors_header import read_header
from pop_engine.builder.checkpoint.tokenizer_files import save_folder_tokenizer
from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import ModelSource, TokenizerRecord

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class SafetensorsTensor(StoredTensor):
    """A tensor that lies in a safetensors file as it is."""

    def read(self) -> torch.Tensor:
        """Read the tensor in its stored dtype. Raises EngineError where that is no floating point or bytes lack."""
        if self.dtype not in _TORCH_DTYPES:
            expected = ", ".join(_TORCH_DTYPES)
            raise EngineError(f"{self.file}: tensor {self.name} is stored as {self.dtype}; expected {expected}")
        dtype = _TORCH_DTYPES[self.dtype]
        if self.num_bytes == 0:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.read_bytes(), dtype=dtype).reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsCheckpoint:
    """A checkpoint folder, opened."""

    source: ModelSource
    options: BuildOptions
    hf_config: PreTrainedConfig
    tensors: Mapping[str, StoredTensor] | None
    directory: Path
    trust_remote_code: bool

    @property
    def processor_folder(self) -> Path | None:
        """The folder itself."""
        return self.directory

    def save_tokenizer(self, directory: Path) -> TokenizerRecord | None:
        """Write tokenizer.json into a folder; None where this checkpoint has no tokenizer files.

        Raises EngineError where the tokenizer is damaged or not a fast one.
        """
        return save_folder_tokenizer(
            self.directory, directory, self.hf_config, trust_remote_code=self.trust_remote_code
        )


def open_safetensors(
    directory: Path, source: ModelSource, options: BuildOptions, *, with_weights: bool, trust_remote_code: bool
) -> SafetensorsCheckpoint:
    """Open a checkpoint folder and list its tensors.

    Raises UsageError where it is no such folder, EngineError where a weight file is missing or damaged.
    """
    hf_config = read_model_config(directory, trust_remote_code=trust_remote_code)
    tensors = with_converted_tensors(_list_tensors(directory), hf_config) if with_weights else None
    return SafetensorsCheckpoint(source, options, hf_config, tensors, directory, trust_remote_code)


def _list_tensors(directory: Path) -> dict[str, StoredTensor]:
    index = directory / _INDEX
    indexed = {} if (directory / _SINGLE).is_file() or not index.is_file() else _read_index(index)
    files = sorted({directory / name for name in indexed.values()}) or _unindexed_files(directory)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for span in read_header(file):
            if (other := tensors.get(span.name)) is not None:
                raise EngineError(f"{file}: tensor {span.name} is also in {other.file.name}; remove the stale file")
            tensors[span.name] = SafetensorsTensor(span.name, span.shape, span.dtype, file, span.begin, span.num_bytes)
    for name, file_name in indexed.items():
        if name not in tensors:
            raise EngineError(f"{directory / file_name}: tensor {name} of {_INDEX} is not in it; fetch the file again")
    return tensors


def _unindexed_files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    files = sorted(file for file in directory.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    if any(directory.glob("*.bin")):
        raise UsageError(
            f"{directory}: its weights are pickled .bin files, which are not read; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise UsageError(f"{directory}: no *.safetensors file in it; expected weights, or build with --no-weights")


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        indexed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{index}: damaged: it has no readable weight_map; fetch the file again") from error
    for file in sorted(set(indexed.values())):
        if Path(file).name != file:
            raise EngineError(f"{index}: damaged: shard {file!r} is not a bare file name; fetch the file again")
        if not (index.parent / file).is_file():
            raise EngineError(f"{index.parent / file}: missing, but {_INDEX} lists it; fetch the file")
    return indexed
