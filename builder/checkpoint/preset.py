"""A preset: a short name for a model, its checkpoint, its options and enough of its config to build offline."""

import difflib
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec
import yaml

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.build_config import BuildOptions, options_from_mapping
from pop_engine.configs.errors import UsageError

_SUFFIX = ".yaml"


@dataclass(frozen=True)
class PresetPackage:
    """A Python package that carries the checkpoint: how pip names it, its module and the file inside the module."""

    requirement: str
    module: str
    file: str


@dataclass(frozen=True)
class Preset:
    """One file of configs/presets. `hf_config` is the model's config.json as far as the graphs need it.

    `num_parameters` is the published count, tied tensors counted once.
    """

    name: str
    hub_id: str
    revision: str | None
    num_parameters: int
    package: PresetPackage | None
    options: BuildOptions
    hf_config: dict[str, Any]


class _PresetFile(msgspec.Struct, forbid_unknown_fields=True):
    hub_id: str
    num_parameters: int
    hf_config: dict[str, Any]
    revision: str | None = None
    package: PresetPackage | None = None
    options: dict[str, Any] = {}


def list_presets() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    files = (entry.name for entry in _folder().iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def load_preset(name: str) -> Preset:
    """Read one preset.

    Raises UsageError where no preset has this name (with the closest ones) or its file is not valid.
    """
    names = list_presets()
    if name not in names:
        raise UsageError(f"preset {name!r}: unknown; {suggest_presets(name)}")
    origin = f"preset {name}"
    try:
        content = yaml.safe_load(_folder().joinpath(name + _SUFFIX).read_text(encoding="utf-8"))
        file = msgspec.convert(content, _PresetFile)
    except (UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise UsageError(f"{origin}: damaged preset file ({reason(error)}); install pop-engine again") from error
    options = options_from_mapping(file.options, origin)
    return Preset(name, file.hub_id, file.revision, file.num_parameters, file.package, options, file.hf_config)


def suggest_presets(name: str) -> str:
    """The presets a person may have meant, as the end of an error message."""
    names = list_presets()
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(names)}"


def _folder() -> Traversable:
    return resources.files("pop_engine.configs").joinpath("presets")
