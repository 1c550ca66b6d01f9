"""What `pop-build --list` prints: the presets, one a line."""

from pop_engine.builder.checkpoint.preset import Preset, list_presets, load_preset

_COLUMNS = ("preset", "model", "layers", "tail", "parameters", "images")
_TO_THE_RIGHT = ("layers", "tail", "parameters")
_BILLION, _MILLION = 1e9, 1e6


def preset_table() -> str:
    """All presets in aligned columns under one line of headings, the models of a family by size."""
    presets = sorted(map(load_preset, list_presets()), key=lambda preset: (_family(preset), preset.num_parameters))
    rows = [_COLUMNS, *map(_row, presets)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(_COLUMNS, row, widths, strict=True)
        padded = (cell.rjust(width) if name in _TO_THE_RIGHT else cell.ljust(width) for name, cell, width in cells)
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def _family(preset: Preset) -> str:
    """A preset's name up to its size."""
    return preset.name.rpartition("-")[0]


def _row(preset: Preset) -> tuple[str, ...]:
    text = preset.hf_config.get("text_config", preset.hf_config)
    return (
        preset.name,
        preset.hub_id,
        str(text["num_hidden_layers"]),
        str(preset.options.tail_layers),
        _format_count(preset.num_parameters),
        "yes" if "vision_config" in preset.hf_config else "no",
    )


def _format_count(count: int) -> str:
    """A number of parameters as model cards write it: 135M, 8.03B."""
    return f"{count / _MILLION:.0f}M" if round(count / _MILLION) < 1000 else f"{count / _BILLION:.2f}B"
