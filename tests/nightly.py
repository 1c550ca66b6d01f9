"""What CI has no time for: `make test-all` runs it too."""

from typing import Any

import pytest


def nightly_unless(is_in_ci: bool, *values: Any, name: str | None = None) -> Any:
    """Values of a parametrized test, for CI or for the night."""
    return pytest.param(*values, id=name, marks=[] if is_in_ci else [pytest.mark.nightly])
