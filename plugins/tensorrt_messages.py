"""TensorRT's and TensorRT-RTX's Python modules: what they are called, and what they log."""

from typing import Any

from pop_engine.configs.errors import EngineError
from pop_engine.configs.manifest import TargetName

# The modules have no type information, so what they make is Any wherever it is used.
Module = Any

MODULES: dict[TargetName, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}


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
