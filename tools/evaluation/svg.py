"""Plots as SVG text: points with error bars and lines over two axes. Colours are the page's style classes.

Classes: `series-N` on everything of series N, `grid`, `axis`, `limit`, `band`; text takes the page's colour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 52
_MAX_TICKS = 6
# Of the range of the values, this much is left free on every side.
_MARGIN = 0.05


@dataclass(frozen=True)
class Point:
    """A value, its standard error, and what is said of it when pointed at."""

    x: float
    y: float
    error: float = 0.0
    label: str = ""
    title: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind, joined by a line or not. `style` is the N of its class."""

    name: str
    points: Sequence[Point]
    style: int
    has_line: bool = True
    has_marks: bool = True


@dataclass(frozen=True)
class Plot:
    """Two axes and what is drawn over them.

    `limit` is a horizontal line, `diagonal` the line of x = y, `band` a stretch of the horizontal axis.
    """

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series]
    limit: float | None = None
    limit_name: str = ""
    diagonal: bool = False
    band: tuple[float, float] | None = None
    band_name: str = ""
    x_format: Callable[[float], str] = field(default=lambda value: f"{value:g}")
    y_format: Callable[[float], str] = field(default=lambda value: f"{value:g}")


@dataclass(frozen=True)
class _Frame:
    """Where values are on the picture."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def draw(plot: Plot) -> str:
    """The plot as one <svg> element. A plot without points has axes around 0 to 1."""
    frame = _frame(plot)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">',
        *_band(plot, frame),
        *_axes(plot, frame),
        *_lines(plot, frame),
        *(part for series in plot.series for part in _series(series, frame)),
        *_legend(plot.series),
        "</svg>",
    ]
    return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover the range, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / _MAX_TICKS
    power: float = 10.0 ** floor(log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [round(index * step, 12) for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _frame(plot: Plot) -> _Frame:
    points = [point for series in plot.series for point in series.points]
    xs = [point.x for point in points]
    ys = [edge for point in points for edge in (point.y - point.error, point.y + point.error)]
    if plot.limit is not None:
        ys.append(plot.limit)
    if plot.diagonal:
        xs = ys = [*xs, *ys]
    return _Frame(*_range(xs), *_range(ys))


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    # A single value still needs a range around it.
    margin = (high - low) * _MARGIN or abs(high) * _MARGIN or 1.0
    return low - margin, high + margin


def _band(plot: Plot, frame: _Frame) -> list[str]:
    if plot.band is None:
        return []
    start, end = (min(max(frame.x(edge), LEFT), WIDTH - RIGHT) for edge in plot.band)
    size = f'width="{end - start:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
    return [
        f'<rect class="band" x="{start:.1f}" y="{TOP}" {size}/>',
        text_element((start + end) / 2, TOP + 14, plot.band_name, "middle"),
    ]


def _axes(plot: Plot, frame: _Frame) -> list[str]:
    bottom, right, middle = HEIGHT - BOTTOM, WIDTH - RIGHT, (HEIGHT - BOTTOM + TOP) / 2
    parts = []
    for value in ticks(frame.x_low, frame.x_high):
        x = frame.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(text_element(x, bottom + 18, plot.x_format(value), "middle"))
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text_element(LEFT - 8, y + 4, plot.y_format(value), "end"))
    parts.append(f'<polyline class="axis" points="{LEFT},{TOP} {LEFT},{bottom} {right},{bottom}"/>')
    parts.append(text_element((LEFT + right) / 2, HEIGHT - 10, plot.x_title, "middle"))
    turned = f' transform="rotate(-90 14 {middle:.1f})"'
    parts.append(text_element(14, middle, plot.y_title, "middle", turned))
    return parts


def _lines(plot: Plot, frame: _Frame) -> list[str]:
    parts, right = [], WIDTH - RIGHT
    if plot.limit is not None:
        y = frame.y(plot.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text_element(right - 4, y - 5, plot.limit_name, "end"))
    if plot.diagonal:
        low, high = max(frame.x_low, frame.y_low), min(frame.x_high, frame.y_high)
        ends = f'x1="{frame.x(low):.1f}" x2="{frame.x(high):.1f}" y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}"'
        parts.append(f'<line class="limit" {ends}/>')
    return parts


def _series(series: Series, frame: _Frame) -> list[str]:
    parts = [f'<g class="series-{series.style}">']
    if series.has_line and len(series.points) > 1:
        path = " ".join(f"{frame.x(point.x):.1f},{frame.y(point.y):.1f}" for point in series.points)
        parts.append(f'<polyline points="{path}"/>')
    for point in series.points:
        x, y = frame.x(point.x), frame.y(point.y)
        if point.error:
            ends = f'y1="{frame.y(point.y - point.error):.1f}" y2="{frame.y(point.y + point.error):.1f}"'
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {ends}/>')
        if series.has_marks:
            title = f"<title>{escape(point.title)}</title>" if point.title else ""
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5">{title}</circle>')
        if point.label:
            parts.append(text_element(x + 7, y - 6, point.label, "start"))
    return [*parts, "</g>"]


def _legend(all_series: Sequence[Series]) -> list[str]:
    parts, x = [], float(LEFT)
    for series in all_series:
        parts.append(f'<g class="series-{series.style}"><circle cx="{x + 5:.1f}" cy="16" r="4.5"/></g>')
        parts.append(text_element(x + 14, 20, series.name, "start"))
        x += 34 + 6.6 * len(series.name)
    return parts


def text_element(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    """A <text> element: `anchor` is start, middle or end, `extra` more attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'
