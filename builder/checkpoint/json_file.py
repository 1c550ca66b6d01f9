"""A JSON file of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from pop_engine.builder.checkpoint.reason import reason
from pop_engine.configs.errors import EngineError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file that is there. Raises EngineError where it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{path}: not JSON ({reason(error)}); fetch the file again") from error
    if not isinstance(content, dict):
        raise EngineError(f"{path}: expected a JSON object, found {type(content).__name__}; fetch the file again")
    return content
