"""What a failed trace says in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PretrainedConfig

from pop_engine.configs.errors import EngineError, PopError


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def tracing(config: PretrainedConfig, phase: str) -> Iterator[None]:
    """Within it, whatever fails becomes an EngineError about this graph; our own errors stay what they are."""
    try:
        yield
    except PopError:
        raise
    except Exception as error:
        raise EngineError(
            f"model type {config.model_type}: the {phase} graph cannot be traced ({first_line(error)}); "
            "--verbose shows where"
        ) from error
