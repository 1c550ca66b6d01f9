"""Turn the families' recorded test results into the README's table."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_FAMILIES = Path(__file__).resolve().parent.parent / "tests" / "families"
_BEGIN, _END = "<!-- families: made by tools/family_table.py -->", "<!-- /families -->"


def main() -> int:
    """Print the table, or put it between its marks in a Markdown file."""
    parser = argparse.ArgumentParser(prog="family_table", description=__doc__)
    parser.add_argument("--results", type=Path, default=_FAMILIES, help="folder where tests/families recorded")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a Markdown file with the marks")
    options = parser.parse_args()
    results, plans = (
        json.loads((options.results / name).read_text(encoding="utf-8"))
        for name in ("results.json", "tensorrt_rtx.json")
    )
    table = family_table(results, plans)
    if options.into is None:
        print(table)
        return 0
    text = options.into.read_text(encoding="utf-8")
    if _BEGIN not in text or _END not in text:
        print(f"family_table: error: {options.into}: has no {_BEGIN} and {_END}", file=sys.stderr)
        return 2
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    options.into.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")
    return 0


def family_table(results: dict[str, dict[str, Any]], plans: dict[str, str]) -> str:
    """One line a family: what it is there for, and whether it works on a target or with which words it is refused.

    `plans` has the outcome on tensorrt-rtx by family; a family that it lacks was not compiled.
    """
    lines = ["| family | what it adds | ort-cpu | tensorrt-rtx (compiled, never run) |", "|---|---|---|---|"]
    for name, result in results.items():
        outcome = f"refused: {result['refusal']}" if "refusal" in result else "works"
        compiled = plans.get(name, "not tried")
        # A model that no target can have says so once.
        compiled = compiled if compiled == "works" or "refusal" not in result else "refused too"
        prefix = "refused: " if compiled not in ("works", "not tried", "refused too") else ""
        # Compiled is all that was done.
        compiled = "compiles" if compiled == "works" else compiled
        lines.append(f"| `{name}` | {result['features']} | {outcome} | {prefix}{compiled} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
