"""A GGUF file: one file with config, quantized weights and tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.integrations.gguf.reader import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from pop_engine.builder.checkpoint.checkpoint import StoredTensor
from pop_engine.builder.checkpoint.gguf_tokenizer import save_gguf_tokenizer
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.build_config import BuildOptions
from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import ModelSource, TokenizerRecord

_MAGIC = b"GGUF"
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """A quantized tensor. `shape` is the one of the Hugging Face parameter."""

    stored_name: str
    stored_shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    processor: TensorProcessor

    def read(self) -> torch.Tensor:
        """Read, dequantize to fp32 and undo llama.cpp's reordering.

        Raises EngineError where the quantization is not known or the result has another shape.
        """
        rows = self.stored_shape[:-1]
        content = np.frombuffer(self.read_bytes(), dtype=np.uint8).reshape(*rows, -1)
        try:
            values = gguf.dequantize(content, self.quantization)
        except NotImplementedError as error:
            raise EngineError(f"{self.file}: tensor {self.stored_name}: {error}; use another GGUF file") from error
        # Some processors hand a tensor back through this mapping and not through their result.
        aside: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}
        result = self.processor.process(
            weights=values.reshape(self.stored_shape),
            name=self.stored_name,
            tensor_key_mapping={self.stored_name: self.name},
            parsed_parameters=aside,
        )
        tensor = aside["tensors"][self.name] if result.name is None else _as_tensor(result.weights)
        if tuple(tensor.shape) != self.shape:
            raise EngineError(
                f"{self.file}: tensor {self.stored_name} gives shape {tuple(tensor.shape)}, {self.name} "
                f"needs {self.shape}; use the safetensors folder"
            )
        return tensor


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file, opened."""

    source: ModelSource
    options: BuildOptions
    hf_config: PreTrainedConfig
    tensors: Mapping[str, StoredTensor] | None
    path: Path
    processor_folder: None = None

    def save_tokenizer(self, directory: Path) -> TokenizerRecord | None:
        """Write tokenizer.json into a folder; None where the file has no tokenizer.

        Raises UsageError where it would come out wrong, EngineError where it is damaged.
        """
        return save_gguf_tokenizer(self.path, directory)


def open_gguf(path: Path, source: ModelSource, options: BuildOptions, *, with_weights: bool) -> GgufCheckpoint:
    """Open a GGUF file and list its tensors.

    Raises UsageError where it holds what cannot be read tensor by tensor, EngineError where it is damaged.
    """
    metadata, names = _read_metadata(path)
    _refuse_unsupported(path, metadata, names)
    reader = _open_reader(path)
    content = _read_config(path, reader)
    hf_config = config_from_mapping(content, str(path))
    tensors = _list_tensors(reader, path, hf_config, content) if with_weights else None
    return GgufCheckpoint(source, options, hf_config, tensors, path)


def _as_tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def _read_metadata(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise EngineError(f"{path}: not a GGUF file (it begins with {magic!r}); fetch the file again")
    try:
        return read_gguf_metadata(str(path))
    # struct.error and numpy's errors among them: the readers do not check what they parse.
    except Exception as error:
        raise EngineError(f"{path}: damaged or truncated GGUF file ({reason(error)}); fetch the file again") from error


def _refuse_unsupported(path: Path, metadata: Mapping[str, Any], names: tuple[str, ...]) -> None:
    architecture = metadata["general.architecture"]
    if metadata.get("split.count", 1) > 1:
        raise UsageError(f"{path}: one of {metadata['split.count']} parts; merge them with `llama-gguf-split --merge`")
    if any("_exps." in name for name in names):
        raise UsageError(f"{path}: mixture-of-experts weights cannot be read from GGUF; use the safetensors folder")
    # transformers drops both, and RoPE would silently be the wrong one.
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if _ROPE_FACTORS in names or scaling != "none":
        raise UsageError(
            f"{path}: its RoPE scaling ({_ROPE_FACTORS if _ROPE_FACTORS in names else scaling}) cannot be read "
            "from GGUF; use the safetensors folder"
        )


def _open_reader(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(str(path))
    except Exception as error:
        raise EngineError(f"{path}: damaged or truncated GGUF file ({reason(error)}); fetch the file again") from error


def _read_config(path: Path, reader: gguf.GGUFReader) -> dict[str, Any]:
    try:
        # Opening a file takes seconds, for every word of its vocabulary is parsed: transformers gets the open one.
        with patch.object(gguf, "GGUFReader", return_value=reader):
            content: dict[str, Any] = load_gguf_checkpoint(str(path))["config"]
    except Exception as error:
        raise EngineError(
            f"{path}: its config cannot be read ({reason(error)}); fetch the file again or use the safetensors folder"
        ) from error
    noise = ("_model_name_or_path", "quantization_config")
    return {key: value for key, value in content.items() if key not in noise}


def _list_tensors(
    reader: gguf.GGUFReader, path: Path, hf_config: PreTrainedConfig, content: dict[str, Any]
) -> dict[str, StoredTensor]:
    processor = _processor(reader.fields["general.architecture"].contents(), content)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    hf_names = get_gguf_hf_weights_map(_ParameterNames.of(model), processor)
    tensors: dict[str, StoredTensor] = {}
    for stored in reader.tensors:
        name = hf_names.get(stored.name)
        if name is None:
            continue
        stored_shape = tuple(int(size) for size in reversed(stored.shape))
        tensors[name] = GgufTensor(
            name=name,
            shape=_parameter_shape(stored_shape, shapes.get(name)),
            dtype=stored.tensor_type.name,
            file=path,
            offset=int(stored.data_offset),
            num_bytes=int(stored.n_bytes),
            stored_name=stored.name,
            stored_shape=stored_shape,
            quantization=stored.tensor_type,
            processor=processor,
        )
    return tensors


@dataclass(frozen=True)
class _ParameterNames:
    """What transformers' get_gguf_hf_weights_map asks a model: its parameters, and its base model's.

    Of a whole model it asks every module down to the last, and makes gguf's table of names anew for each.
    """

    config: PreTrainedConfig
    names: tuple[str, ...]
    children: tuple[tuple[str, "_ParameterNames"], ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> "_ParameterNames":
        """The names of a model, and one level below it those of its base model."""
        base = cls(model.config, tuple(model.base_model.state_dict()))
        return cls(model.config, tuple(model.state_dict()), ((model.base_model_prefix, base),))

    def state_dict(self) -> dict[str, None]:
        """The names as keys; no value is looked at."""
        return dict.fromkeys(self.names)

    def named_children(self) -> tuple[tuple[str, "_ParameterNames"], ...]:
        """The base model, or nothing below it."""
        return self.children


def _processor(architecture: str, content: dict[str, Any]) -> TensorProcessor:
    kind: type[TensorProcessor] = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    return kind(config=content)


def _parameter_shape(stored: tuple[int, ...], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """Processors may transpose or add an axis of one; a tensor of another size keeps its own shape, to be refused."""
    if wanted is not None and np.prod(stored) == np.prod(wanted):
        return wanted
    return stored
