"""The checkpoint of an engine as the folder that other engines read: config.json, safetensors, a tokenizer."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import CALIBRATED_WEIGHTS, TOKENIZER_NAME, DType, Manifest

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class PeerCheckpoint:
    """What the engine was built from. `gguf` is there where it was a GGUF file, `folder` in every case."""

    folder: Path
    dtype: DType
    gguf: Path | None


def peer_checkpoint(engine: Path, manifest: Manifest, work_dir: Path, gguf: Path | None) -> PeerCheckpoint:
    """The folder that the engine was built from; where that is none, one made of the engine's own weights.

    It has the engine's numbers: same weights, same dtype. Raises UsageError where the engine has no weights.
    """
    if manifest.weights is None:
        raise UsageError(f"{engine}: built without weights, so peers have nothing to run; leave --peers out")
    location = Path(manifest.source.location)
    if gguf is None and location.is_file():
        gguf = location
    if (location / _CONFIG).is_file():
        return PeerCheckpoint(location, manifest.dtype, gguf)
    folder = work_dir / "checkpoint"
    if not (folder / _CONFIG).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _link_weights(engine, manifest, folder)
        _write_tokenizer(engine, manifest, folder)
        # Last, because it is what says that the folder is whole.
        _write_config(manifest, folder)
    return PeerCheckpoint(folder, manifest.dtype, gguf)


def _link_weights(engine: Path, manifest: Manifest, folder: Path) -> None:
    """Hard links where they are possible: the checkpoint is as large as the engine."""
    from safetensors import safe_open

    assert manifest.weights is not None
    files = [Path(record.path) for record in manifest.weights.files if not record.path.endswith(CALIBRATED_WEIGHTS)]
    names = {files[0]: _WEIGHTS} if len(files) == 1 else {file: file.name for file in files}
    weight_map: dict[str, str] = {}
    for file, name in names.items():
        target = folder / name
        target.unlink(missing_ok=True)
        try:
            os.link(engine / file, target)
        except OSError:
            shutil.copyfile(engine / file, target)
        with safe_open(target, "np") as content:
            weight_map |= dict.fromkeys(content.keys(), name)
    if len(files) > 1:
        index = {"metadata": {"total_size": manifest.weights.num_bytes}, "weight_map": weight_map}
        (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write_tokenizer(engine: Path, manifest: Manifest, folder: Path) -> None:
    """Peers get tokens, but the builders of some of them refuse a folder without a tokenizer."""
    if manifest.tokenizer is None:
        return
    shutil.copyfile(engine / TOKENIZER_NAME, folder / TOKENIZER_NAME)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **manifest.tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _write_config(manifest: Manifest, folder: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from pop_engine.builder.checkpoint.source import open_checkpoint

    options = BuildOptions(revision=manifest.source.revision)
    asked = BuildConfig(manifest.source.location, folder, options, verify=False, with_weights=False)
    config = open_checkpoint(asked).hf_config
    content = config.to_dict()
    # A GGUF file's config names no class, and the builders of others ask for it.
    content["architectures"] = content.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    content["dtype"] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[manifest.dtype]
    (folder / _CONFIG).write_text(json.dumps(content, indent=2), encoding="utf-8")
