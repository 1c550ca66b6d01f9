"""What MODEL on the command line stands for, told by names alone: nothing here imports torch or transformers."""

import re
from dataclasses import dataclass
from pathlib import Path

from pop_engine.builder.checkpoint.preset import Preset, list_presets, load_preset, suggest_presets
from pop_engine.configs.errors import UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors")


@dataclass(frozen=True)
class HubId:
    """A checkpoint of the hub: `org/name`."""

    name: str


def locate_model(model: str, revision: str | None) -> Preset | Path | HubId:
    """Raises UsageError where it is none of them, or a path with a revision."""
    if model in list_presets():
        return load_preset(model)
    path = Path(model).expanduser()
    if model and path.exists():
        if revision is not None:
            raise UsageError(f"--revision {revision}: {model} is a local path; leave --revision out")
        return path
    if _HUB_ID.fullmatch(model) and path.suffix not in _FILE_SUFFIXES:
        return HubId(model)
    if "/" in model or path.suffix in _FILE_SUFFIXES:
        raise UsageError(f"--model {model}: no such file or folder; expected a checkpoint folder or a .gguf file")
    raise UsageError(
        f"--model {model!r}: neither a preset, an existing path nor a hub id (org/name); {suggest_presets(model)}"
    )
