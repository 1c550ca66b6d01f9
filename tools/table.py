"""Text for people: aligned columns and sizes."""

from collections.abc import Sequence

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def align_rows(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset(), indent: str = "") -> list[str]:
    """Lines whose columns line up, two blanks apart. `right` names the columns that align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def format_bytes(num_bytes: int) -> str:
    """A size in decimal units, as disks and model cards count."""
    size, unit = float(num_bytes), 0
    while size >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{size:.3g} {_BYTE_UNITS[unit]}"
