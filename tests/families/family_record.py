"""What the families' tests found before, in JSON: the README's table is made of it."""

import json
import os
from pathlib import Path

from families.family_table import FAMILIES


def check_recorded(record: Path, name: str, found: object) -> None:
    """A family's result is the one on record, so that a change which alters it is seen.

    UPDATE_FAMILIES=1 records instead; `python -m pop_engine.tools.family_table` makes the README's table of it.
    """
    recorded = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if os.environ.get("UPDATE_FAMILIES"):
        recorded[name] = found
        ordered = {known: recorded[known] for known in FAMILIES if known in recorded}
        record.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    else:
        assert recorded.get(name) == found, f"{name} differs from {record.name}; UPDATE_FAMILIES=1 records it anew"
