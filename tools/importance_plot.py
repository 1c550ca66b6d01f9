"""The importance of every layer at prefill and at decode, as an SVG file."""

from collections.abc import Sequence
from math import log

from pop_engine.configs.calibration import Estimate
from pop_engine.configs.prune_plan import PrunePlan
from pop_engine.configs.prune_plan_file import ImportanceRecord
from pop_engine.tools.evaluation.svg import HEIGHT, WIDTH, Plot, Point, Series, draw

# The writer leaves colours to the page; a file on its own brings them.
_STYLE = """
text { font: 12px sans-serif; fill: #333 }
.grid { stroke: #ddd } .band { fill: #f1f3f6 } .axis { stroke: #333; fill: none }
.series-0 { stroke: #1f6fb2; fill: #1f6fb2 } .series-1 { stroke: #c8501e; fill: #c8501e }
polyline { fill: none; stroke-width: 1.5 } .series-0 text, .series-1 text { stroke: none }
"""


def importance_svg(record: ImportanceRecord) -> str:
    """A whole file, the paper's tail marked. The vertical axis is logarithmic; an importance of 0 has no point."""
    tail = PrunePlan.last_third(len(record.prefill)).tail
    plot = Plot(
        f"Importance of each layer: {record.model}, {record.num_samples} samples",
        f"layer of {record.model}; bars are standard errors over {record.num_samples} samples",
        "importance: E[(∂L/∂g)²]",
        [Series("prefill", _points(record.prefill), 0), Series("decode", _points(record.decode), 1)],
        band=(tail.start - 0.5, tail.stop - 0.5),
        band_name="last third",
        y_format=_power,
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}\n<style>{_STYLE}</style>\n{paper}\n{draw(plot)}\n</svg>\n"


def _points(estimates: Sequence[Estimate]) -> list[Point]:
    return [_point(layer_idx, found) for layer_idx, found in enumerate(estimates) if found.value > 0]


def _point(layer_idx: int, found: Estimate) -> Point:
    # To first order; the bars of a logarithm are as long up as down.
    error = found.standard_error / found.value / log(10)
    title = f"layer {layer_idx}: {found.value:.3g} ± {found.standard_error:.2g}"
    return Point(layer_idx, log(found.value, 10), error, title=title)


def _power(exponent: float) -> str:
    """Ten to that, in two digits and without an exponent where it is short."""
    rounded = float(f"{10**exponent:.2g}")
    return f"{rounded:g}"
