"""gpu_check: what POP does on this machine's NVIDIA GPU, with whatever is installed here, as one JSON.

`python tools/gpu_check.py --json OUT` runs from a plain checkout, without pop-engine installed and without network.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

# A script's own folder is the first place for imports, and this one has an inspect.py, which is not Python's.
_TOOLS = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _TOOLS]
if importlib.util.find_spec("pop_engine") is None:
    _checkout = ModuleType("pop_engine")
    _checkout.__path__ = [str(_TOOLS.parent)]
    sys.modules["pop_engine"] = _checkout

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable, Iterable  # noqa: E402
from dataclasses import asdict, is_dataclass  # noqa: E402
from typing import Any  # noqa: E402

from pop_engine.configs.errors import UsageError, exit_with_message  # noqa: E402
from pop_engine.tools.gpu_check_machine import describe_checked_machine, missing_gpu  # noqa: E402
from pop_engine.tools.gpu_check_plan import Budget, CheckPlan, say  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Check, and write the JSON after every part. Exit code 0, also where parts failed: the JSON says which."""
    arguments = _parser().parse_args(argv)
    return exit_with_message("gpu_check", lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check POP on an NVIDIA GPU.", allow_abbrev=False)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="what to write")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu is for a dry run")
    add("--tiny", action="store_true", help="tiny models and short prompts")
    add("--minutes", type=float, default=10.0, metavar="N", help="leave out what does not fit into them (10)")
    add("--engine", type=Path, action="append", default=[], metavar="DIR", help="measure this engine too")
    add("--checkpoint", type=Path, metavar="DIR", help="what those engines were built from, to compare numbers with")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    reason = missing_gpu() if arguments.device == "cuda" else None
    if reason is not None:
        raise UsageError(f"--device cuda: {reason}; run it where an NVIDIA GPU is, or try it with --device cpu --tiny")
    plan = CheckPlan(arguments.device, arguments.tiny, arguments.minutes, tuple(arguments.engine), arguments.checkpoint)
    report = CheckReport(arguments.json)
    budget = Budget(plan.minutes)
    report.add("machine", lambda: [describe_checked_machine(plan.device)])
    _check_reference(plan, budget, report)
    _check_engines(plan, budget, report)
    print(f"{arguments.json}: {report.num_failed} of {report.num_parts} parts ended early")
    return 0


class CheckReport:
    """The JSON: for every part its rows, and what ended it early, if anything did."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, dict[str, Any]] = {}

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    @property
    def num_failed(self) -> int:
        """How many of them were ended by an error, or for lack of time."""
        return sum("error" in part for part in self._parts.values())

    def add(self, name: str, rows: Callable[[], Iterable[Any]]) -> None:
        """Run a part and write what it yields. Whatever it raises is written down, and the check goes on."""
        part: dict[str, Any] = {"rows": []}
        self._parts[name] = part
        try:
            for row in rows():
                part["rows"].append(asdict(row) if is_dataclass(row) and not isinstance(row, type) else row)
                self._write()
        except Exception as error:
            part["error"] = f"{type(error).__name__}: {error}"
            say(f"{name}: {part['error']}")
        self._write()

    def _write(self) -> None:
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self._parts, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._path)


def _check_reference(plan: CheckPlan, budget: Budget, report: CheckReport) -> None:
    """With torch alone: POP's numbers, time to first token and decode, in PyTorch."""
    try:
        from pop_engine.tools import gpu_check_reference as reference
    except ImportError as error:
        report.add("reference", _raiser(error))
        return
    report.add("reference_numbers", lambda: reference.check_numbers(plan, budget))
    try:
        rates = reference.reference_rates(plan)
        model = reference.fitting_model(plan)
    except Exception as error:
        report.add("reference", _raiser(error))
        return
    report.add("rates", lambda: [rates])
    report.add("reference_ttft", lambda: reference.check_ttft(model, rates, plan, budget))
    report.add("reference_decode", lambda: reference.check_decode(model, rates, plan, budget))


def _check_engines(plan: CheckPlan, budget: Budget, report: CheckReport) -> None:
    """With pop-engine's dependencies and a target's package: engines, built here or given."""
    try:
        from pop_engine.tools import gpu_check_engine_parts as parts
    except ImportError as error:
        report.add("engines", _raiser(error))
        return
    report.add("given_engines", lambda: parts.check_given_engines(plan, budget))
    for target in parts.found_targets() if plan.device == "cuda" else ():
        report.add(f"{target}_numbers", lambda target=target: parts.check_target_numbers(target, plan, budget))  # type: ignore[misc]
        report.add(f"{target}_times", lambda target=target: parts.check_target_times(target, plan, budget))  # type: ignore[misc]


def _raiser(error: Exception) -> Callable[[], Iterable[Any]]:
    def rows() -> Iterable[Any]:
        raise error

    return rows


if __name__ == "__main__":
    sys.exit(main())
