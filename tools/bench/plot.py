"""Times to the first token as an SVG file: a group of bars a prompt length, a bar an engine."""

from dataclasses import dataclass
from html import escape

from pop_engine.tools.bench.result import FULL, BatchRow, BenchRun, Timing
from pop_engine.tools.evaluation.svg import text_element, ticks

WIDTH, PLOT_HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
_LEGEND_LINE, _LEGEND_COLUMN = 20, 272
_GROUP_SHARE = 0.84
# Okabe and Ito's colours, told apart by colour-blind people too; they begin again where there are more engines.
_COLOURS = (
    "#0072b2", "#999999", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#f0e442", "#444444", "#882255",
    "#44aa99", "#ddcc77",
)  # fmt: skip
_STYLE = """
text { font: 12px sans-serif; fill: #333 }
.grid { stroke: #ddd } .axis { stroke: #333; fill: none } .spread { stroke: #333 }
.bound { stroke: #000; stroke-width: 2; stroke-dasharray: 4 2 }
"""


@dataclass(frozen=True)
class _Axes:
    """Where times and groups are on the picture."""

    highest: float
    num_groups: int

    def y(self, ms: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - ms / self.highest)

    @property
    def group_width(self) -> float:
        return (WIDTH - LEFT - RIGHT) / self.num_groups

    def x(self, group: int, share: float) -> float:
        """`share` of the way through a group's bars."""
        return LEFT + self.group_width * (group + (1 - _GROUP_SHARE) / 2 + _GROUP_SHARE * share)


def ttft_svg(run: BenchRun) -> str:
    """A whole file. Bars are medians with their 10th to 90th percentile; a dashed line is what POP's bound allows.

    Of several batch sizes the smallest is drawn.
    """
    rows = [row for row in run.rows if row.batch_size == min(other.batch_size for other in run.rows)]
    engines = list(dict.fromkeys(timing.engine for row in rows for timing in row.timings))
    highest = max((timing.ttft_ms.p90 for row in rows for timing in row.timings), default=1.0) * 1.05
    axes = _Axes(highest, max(len(rows), 1))
    height = TOP + PLOT_HEIGHT + BOTTOM + _LEGEND_LINE * (-(-(len(engines) + 1) // 3))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    parts = [
        head,
        f'<style>{_STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>',
        text_element(LEFT, 20, f"Time to the first token, {run.threads} threads, {run.machine.cpu_model}", "start"),
        *_grid(axes),
        *(part for group, row in enumerate(rows) for part in _group(axes, group, row, engines)),
        *_legend(engines),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(axes: _Axes) -> list[str]:
    right, bottom = WIDTH - RIGHT, TOP + PLOT_HEIGHT
    parts = []
    for value in ticks(0.0, axes.highest):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text_element(LEFT - 8, y + 4, f"{value:g}", "end"))
    parts.append(f'<polyline class="axis" points="{LEFT},{TOP} {LEFT},{bottom} {right},{bottom}"/>')
    middle = TOP + PLOT_HEIGHT / 2
    parts.append(text_element(14, middle, "milliseconds", "middle", f' transform="rotate(-90 14 {middle:.1f})"'))
    return parts


def _group(axes: _Axes, group: int, row: BatchRow, engines: list[str]) -> list[str]:
    parts = [text_element(axes.x(group, 0.5), TOP + PLOT_HEIGHT + 18, f"{row.input_len} prompt tokens", "middle")]
    for timing in row.timings:
        parts += _bar(axes, group, timing, engines)
    full = next((timing for timing in row.timings if timing.engine == FULL), None)
    if full is not None:
        y = axes.y(full.ttft_ms.median / row.bound)
        left, right = axes.x(group, 0), axes.x(group, 1 / len(engines))
        title = f"<title>{full.ttft_ms.median / row.bound:.0f} ms, the full engine's over {row.bound:.2f}</title>"
        parts.append(f'<line class="bound" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}">{title}</line>')
    return parts


def _bar(axes: _Axes, group: int, timing: Timing, engines: list[str]) -> list[str]:
    place, found = engines.index(timing.engine), timing.ttft_ms
    left, right = axes.x(group, (place + 0.08) / len(engines)), axes.x(group, (place + 0.92) / len(engines))
    top, bottom, middle = axes.y(found.median), TOP + PLOT_HEIGHT, (left + right) / 2
    size = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
    title = f"<title>{escape(timing.engine)}: {found.median:.1f} ms</title>"
    ends = f'y1="{axes.y(found.p10):.1f}" y2="{axes.y(found.p90):.1f}"'
    return [
        f'<rect {size} fill="{_colour(place)}">{title}</rect>',
        f'<line class="spread" x1="{middle:.1f}" x2="{middle:.1f}" {ends}/>',
    ]


def _legend(engines: list[str]) -> list[str]:
    parts = []
    for place, name in enumerate([*engines, "bound of POP"]):
        x = LEFT + _LEGEND_COLUMN * (place % 3)
        y = TOP + PLOT_HEIGHT + BOTTOM + _LEGEND_LINE * (place // 3)
        if place < len(engines):
            parts.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{_colour(place)}"/>')
        else:
            parts.append(f'<line class="bound" x1="{x}" x2="{x + 12}" y1="{y - 4}" y2="{y - 4}"/>')
        parts.append(text_element(x + 17, y, name, "start"))
    return parts


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]
