"""TensorRT's Python module, of the version that the plans were compiled with, and what it logs."""

import importlib
from typing import Any

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import TargetName

# The modules have no type information, so what they make is Any throughout the sessions.
Module = Any

_MODULES: dict[TargetName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


def load_module(target: TargetName, built_with: str, *, version_compatible: bool) -> Module:
    """The target's module. A plan runs on the version that compiled it, or on any of its major where it says so.

    Raises EngineError where the package or its libraries are missing, or of another version.
    """
    name, install = _MODULES[target], f"pip install 'pop-engine[{target}]'"
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


class Messages:
    """Keeps TensorRT's last error, so that ours can say why. It must outlive whatever was made with its logger."""

    def __init__(self, trt: Module) -> None:
        errors: list[str] = []
        severities = (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR)

        class Logger(trt.ILogger):  # type: ignore[misc]
            """TensorRT logs through a subclass of its own class, which exists only once the module does."""

            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in severities:
                    errors.append(message)

        self.logger = Logger()
        self._errors = errors

    def failure(self, what: str) -> EngineError:
        """An error about `what`, with TensorRT's last words."""
        return EngineError(f"{what}: {self._errors[-1] if self._errors else 'TensorRT gives no reason'}")
