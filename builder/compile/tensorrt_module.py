"""TensorRT and TensorRT-RTX: one API in two modules, imported only when a target asks for it."""

import importlib
from typing import Any

from pop_engine.configs.errors import EngineError, UsageError
from pop_engine.configs.manifest import TargetName

# The modules have no type information, so what they make is Any throughout builder/compile.
Module = Any

_PACKAGES: dict[str, tuple[str, str]] = {
    "tensorrt": ("tensorrt", "pip install 'pop-engine[tensorrt]'"),
    "tensorrt-rtx": ("tensorrt_rtx", "pip install 'pop-engine[tensorrt-rtx]'"),
}


def load_module(target: TargetName) -> Module:
    """The target's module. Raises UsageError that says what is missing: the package, or its libraries."""
    name, install = _PACKAGES[target]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--target {target}: the package {error.name} is not installed; `{install}`") from error
    except Exception as error:
        raise UsageError(
            f"--target {target}: {name} is installed, but its libraries cannot be loaded ({error}); `{install}`"
        ) from error


class Messages:
    """Collects what TensorRT logs, so that an error can say why. It must outlive whatever was made with it."""

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
        reason = self._errors[-1] if self._errors else "no reason given"
        return EngineError(f"{what}: {reason}")
