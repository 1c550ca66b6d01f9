"""`pop-lm-eval`: lm-evaluation-harness with the model `pop_engine` in it; every option is the harness's own."""

import importlib.util
import sys

from pop_engine.configs.errors import UsageError, exit_with_message


def main() -> int:
    """Register the model, then hand over to the harness."""
    return exit_with_message("pop-lm-eval", _run)


def _run() -> int:
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("lm_eval is not installed; `pip install 'pop-engine[eval]'` brings it")
    from lm_eval.__main__ import cli_evaluate

    from pop_engine.tools.evaluation import harness

    # Named here because importing it is what registers it.
    assert harness.PopEngineLM is not None
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
