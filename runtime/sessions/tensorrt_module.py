"""TensorRT's Python module, of the version that the plans were compiled with."""

import importlib

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import TargetName
from pop_engine.plugins.tensorrt_messages import MODULES, Module


def load_module(target: TargetName, built_with: str, *, version_compatible: bool) -> Module:
    """The target's module. A plan runs on the version that compiled it, or on any of its major where it says so.

    Raises EngineError where the package or its libraries are missing, or of another version.
    """
    name, install = MODULES[target], f"pip install 'pop-engine[{target}]'"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise EngineError(f"target {target}: the package {error.name} is not installed; `{install}`") from error
    except Exception as error:
        raise EngineError(f"target {target}: {name} cannot load its libraries ({error}); `{install}`") from error
    check_version(target, built_with, str(module.__version__), version_compatible=version_compatible)
    return module


def check_version(target: TargetName, built_with: str, found: str, *, version_compatible: bool) -> None:
    """Raise EngineError where a plan compiled with one version cannot run on the other."""
    if found == built_with or (version_compatible and found.split(".")[0] == built_with.split(".")[0]):
        return
    raise EngineError(
        f"target {target}: the plans were compiled with version {built_with}, and {found} is installed; "
        f"install {built_with}, or build the engine again"
    )
