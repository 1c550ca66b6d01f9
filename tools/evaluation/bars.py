"""A chart of horizontal bars with error bars as SVG text, over the same style classes as the plots (svg.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pop_engine.tools.evaluation.svg import text_element, ticks

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 250, 140, 34, 46
_ROW, _BAR = 26, 15


@dataclass(frozen=True)
class Bar:
    """A value, its standard error, the N of its class, and what is written at its end."""

    name: str
    value: float
    error: float
    style: int
    label: str


@dataclass(frozen=True)
class BarChart:
    """Bars from 0, top to bottom, on an axis from `low` to `high`. What lies beyond is cut, with an arrow's head.

    `kinds` name the classes, in order.
    """

    title: str
    x_title: str
    bars: Sequence[Bar]
    low: float
    high: float
    kinds: Sequence[str]
    x_format: Callable[[float], str]


def draw_bars(chart: BarChart) -> str:
    """The chart as one <svg> element."""
    height = TOP + _ROW * len(chart.bars) + BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">',
        *_axis(chart, height),
        *(part for index, bar in enumerate(chart.bars) for part in _bar(chart, bar, TOP + _ROW * index + _ROW / 2)),
        *_legend(chart.kinds),
        "</svg>",
    ]
    return "\n".join(parts)


def _x(chart: BarChart, value: float) -> float:
    inside = min(max(value, chart.low), chart.high)
    return LEFT + (inside - chart.low) / (chart.high - chart.low) * (WIDTH - LEFT - RIGHT)


def _axis(chart: BarChart, height: int) -> list[str]:
    bottom = height - BOTTOM
    parts = []
    for value in ticks(chart.low, chart.high):
        x = _x(chart, value)
        kind = "axis" if value == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(text_element(x, bottom + 18, chart.x_format(value), "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, text_element(middle, height - 8, chart.x_title, "middle")]


def _bar(chart: BarChart, bar: Bar, y: float) -> list[str]:
    zero, end = _x(chart, 0), _x(chart, bar.value)
    left, width = min(zero, end), abs(end - zero)
    parts = [
        f'<g class="series-{bar.style}">',
        f'<rect x="{left:.1f}" y="{y - _BAR / 2:.1f}" width="{width:.1f}" height="{_BAR}" fill-opacity="0.55"/>',
    ]
    if bar.value < chart.low:
        tip = f"{end - 9:.1f},{y:.1f} {end:.1f},{y - _BAR / 2:.1f} {end:.1f},{y + _BAR / 2:.1f}"
        parts.append(f'<polygon points="{tip}"/>')
    elif bar.error:
        ends = f'x1="{_x(chart, bar.value - bar.error):.1f}" x2="{_x(chart, bar.value + bar.error):.1f}"'
        parts.append(f'<line {ends} y1="{y:.1f}" y2="{y:.1f}" stroke-width="2.5"/>')
    parts.append("</g>")
    # Where there is no bar to the left, the name stands before the axis all the same.
    return [
        *parts,
        text_element(LEFT - 14, y + 4, bar.name, "end"),
        text_element(WIDTH - RIGHT + 8, y + 4, bar.label, "start"),
    ]


def _legend(kinds: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for style, kind in enumerate(kinds):
        parts.append(
            f'<g class="series-{style}"><rect x="{x:.1f}" y="10" width="11" height="11" fill-opacity="0.55"/></g>'
        )
        parts.append(text_element(x + 17, 20, kind, "start"))
        x += 40 + 6.6 * len(kind)
    return parts
