"""What the README's measured tables share."""

from collections.abc import Sequence

from pop_engine.tools.machine import Machine


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns align to the right."""
    lines = [header, ["---:" for _ in header], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin(*machines: Machine) -> str:
    """Where figures come from: each machine, commit and day, once."""
    places = (
        f"({machine.cpu_model}, {machine.num_cores} cores, `{machine.commit}`, {machine.date[:10]})"
        for machine in machines
    )
    return " ".join(dict.fromkeys(places))
