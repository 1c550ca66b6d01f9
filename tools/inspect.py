"""pop-inspect: what is in an engine directory, and whether it is whole."""

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.integrity import IntegrityCheck, check_integrity
from pop_engine.tools.report import describe_engine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 0; 1 where a check fails or the manifest is damaged; 2 where there is no engine."""
    return exit_with_message("pop-inspect", lambda: inspect_engine(parse_arguments(argv)))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="pop-inspect", description="Show what is in an engine directory.")
    parser.add_argument("engine", metavar="ENGINE", type=Path, help="engine directory, as pop-build wrote it")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.add_argument("--check", action="store_true", help="recompute the size and hash of every file")
    return parser.parse_args(argv)


def inspect_engine(arguments: argparse.Namespace) -> int:
    """Print the report, and the check where asked for."""
    manifest = Manifest.load(arguments.engine)
    check = check_integrity(arguments.engine, manifest) if arguments.check else None
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The drawing must not end in an encoding error on a terminal that has no blocks.
        sys.stdout.reconfigure(errors="replace")
    print(format_json(manifest, check) if arguments.json else format_text(manifest, check, arguments.engine))
    sys.stdout.flush()
    return 0 if check is None or check.passed else 1


def format_json(manifest: Manifest, check: IntegrityCheck | None) -> str:
    """The manifest as it is on disk, plus a `check` key where a check ran."""
    content = msgspec.to_builtins(manifest)
    if check is not None:
        content["check"] = {"passed": check.passed, **msgspec.to_builtins(check)}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def format_text(manifest: Manifest, check: IntegrityCheck | None, directory: Path) -> str:
    """The report for people, the check below it."""
    report = describe_engine(manifest, directory, shutil.get_terminal_size((100, 24)).columns)
    return "\n".join([report, *([] if check is None else ["", *check.lines()])])


if __name__ == "__main__":
    sys.exit(main())
