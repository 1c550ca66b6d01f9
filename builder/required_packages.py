"""What pop-build and its neighbours need and the runtime does not."""

import importlib.util

from pop_engine.configs.errors import UsageError


def require_build_packages() -> None:
    """Raise UsageError where the `[build]` extra is not installed. Imports nothing: the packages take seconds to."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise UsageError("torch and transformers are not installed; `pip install 'pop-engine[build]'` brings them")
