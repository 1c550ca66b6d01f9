"""TensorRT and TensorRT-RTX: one API in two modules, imported only when a target asks for it."""

import importlib

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import TargetName
from pop_engine.plugins.tensorrt_messages import MODULES, Module


def load_module(target: TargetName) -> Module:
    """The target's module. Raises UsageError that says what is missing: the package, or its libraries."""
    name, install = MODULES[target], f"pip install 'pop-engine[{target}]'"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--target {target}: the package {error.name} is not installed; `{install}`") from error
    except Exception as error:
        raise UsageError(
            f"--target {target}: {name} is installed, but its libraries cannot be loaded ({error}); `{install}`"
        ) from error
