"""Small charts as inline SVG: lines, intervals and a stacked bar.

They need no scripts and no external resources. Colors come from the CSS variables in `style.py`,
so a chart fits light and dark mode. `standalone` adds the CSS to a chart in its own file.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from telescope_core.base.number_text import format_metric, style_of
from telescope_core.reports.style import CHART_STYLE, NUM_COLORS

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 40
_TICK_LENGTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart; it has a gap where a value is None."""

    name: str
    xs: Sequence[float]
    values: Sequence[float | None]
    faint_values: Sequence[float | None] = ()
    """Raw values drawn faintly behind a smoothed line; empty = none."""
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRow:
    """One row of an interval chart."""

    label: str
    mean: float
    low: float | None
    high: float | None
    color: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlotFrame:
    """Maps data coordinates to the drawing area."""

    width: int
    height: int
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = (self.x_high - self.x_low) or 1.0
        return _LEFT + (value - self.x_low) / span * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = (self.y_high - self.y_low) or 1.0
        room = self.height - _TOP - _BOTTOM
        return _TOP + room - (value - self.y_low) / span * room


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    size: tuple[int, int] = (460, 250),
    with_legend: bool = False,
) -> str:
    """Return a line chart; `label` describes it to screen readers."""
    width, height = size
    low, high = y_range or _range([value for line in series for value in _known(line)])
    ticks = ticks_of(low, high, outwards=y_range is None)
    all_xs = [x for line in series for x in line.xs]
    frame = _PlotFrame(
        width=width,
        height=height,
        x_low=min(all_xs, default=0.0),
        x_high=max(all_xs, default=1.0),
        y_low=min(ticks[0], low),
        y_high=max(ticks[-1], high),
    )
    parts = [_grid(frame, ticks), _x_axis(frame, x_label)]
    for line in series:
        parts.append(_path(frame, line.xs, line.faint_values, f"line faint c{_color(line)}"))
        parts.append(_path(frame, line.xs, line.values, f"line c{_color(line)}"))
        parts.append(_last_point(frame, line))
    if with_legend:
        parts.append(_legend(series))
    return _svg(width, height, label, parts)


def interval_chart(
    rows: Sequence[IntervalRow],
    *,
    label: str,
    x_range: tuple[float, float] = (0.0, 1.0),
) -> str:
    """Return a chart with one dot and its interval per row, on a shared axis."""
    width, row_height, top, bottom = 460, 46, 0, 30
    height = top + row_height * len(rows) + bottom
    low, high = x_range

    def x(value: float) -> float:
        return _RIGHT + (value - low) / ((high - low) or 1.0) * (width - 2 * _RIGHT)

    parts: list[str] = []
    for tick in ticks_of(low, high):
        at = f"{x(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(
            f'<text class="tick" x="{at}" y="{height - 10}" text-anchor="middle">'
            f"{format_tick(tick)}</text>"
        )
    for index, row in enumerate(rows):
        parts.append(_interval(row, x, y=top + row_height * index + 30, width=width))
    return _svg(width, height, label, parts)


def _interval(row: IntervalRow, x: Callable[[float], float], *, y: float, width: int) -> str:
    color = f"c{row.color % NUM_COLORS}"
    parts = [f'<text class="name" x="{_RIGHT}" y="{y - 13}">{escape(row.label)}</text>']
    text = format_metric(row.mean)
    if row.low is not None and row.high is not None:
        style = style_of(row.mean, row.low, row.high)
        text = f"{row.mean:{style}} ({row.low:{style}} to {row.high:{style}})"
        ends = f'x1="{x(row.low):.1f}" x2="{x(row.high):.1f}"'
        parts.append(f'<line class="whisker {color}" {ends} y1="{y}" y2="{y}"/>')
        for end in (row.low, row.high):
            at = f'x1="{x(end):.1f}" x2="{x(end):.1f}"'
            parts.append(f'<line class="whisker {color}" {at} y1="{y - 5}" y2="{y + 5}"/>')
    parts.append(f'<circle class="dot {color}" cx="{x(row.mean):.1f}" cy="{y}" r="5"/>')
    parts.append(
        f'<text class="tick" x="{width - _RIGHT}" y="{y - 13}" text-anchor="end">{text}</text>'
    )
    return "".join(parts)


def stacked_bar(parts: Sequence[tuple[str, float]], *, label: str) -> str:
    """Return one bar with a piece per (name, size); a piece's tooltip gives its share."""
    width = 960
    total = sum(size for _, size in parts) or 1.0
    pieces: list[str] = []
    x = 0.0
    for index, (name, size) in enumerate(parts):
        length = size / total * width
        title = f"<title>{escape(name)}: {size / total:.0%}</title>"
        pieces.append(
            f'<rect class="fill c{index % NUM_COLORS}" x="{x:.1f}" y="0" '
            f'width="{max(0.0, length - 2):.1f}" height="34">{title}</rect>'
        )
        x += length
    return _svg(width, 34, label, pieces, css_class="chart bar", stretch=True)


def standalone(svg: str) -> str:
    """Return `svg` as the content of a separate file, with its CSS included."""
    head, _, rest = svg.partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    background = '<rect class="page" width="100%" height="100%" rx="8"/>'
    return f"{head}><style>{CHART_STYLE}</style>{background}{rest}\n"


def ticks_of(low: float, high: float, *, outwards: bool = False) -> list[float]:
    """Return about five round numbers in [low, high]; with `outwards`, they also enclose it."""
    if not high > low:
        return [low]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * unit >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    if outwards:
        return ticks
    slack = 1e-9 * step
    return [tick for tick in ticks if low - slack <= tick <= high + slack] or [low, high]


def format_tick(value: float) -> str:
    """Return `value` as short text for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.4g}"


def _legend(series: Sequence[Series]) -> str:
    parts: list[str] = []
    x = _LEFT + 12.0
    for line in series:
        parts.append(f'<circle class="dot c{_color(line)}" cx="{x:.0f}" cy="{_TOP + 10}" r="5"/>')
        parts.append(
            f'<text class="name" x="{x + 10:.0f}" y="{_TOP + 14}">{escape(line.name)}</text>'
        )
        x += 34 + 7.2 * len(line.name)
    return "".join(parts)


def _grid(frame: _PlotFrame, ticks: Sequence[float]) -> str:
    parts: list[str] = []
    for tick in ticks:
        y = f"{frame.y(tick):.1f}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y}" y2="{y}"/>'
            f'<text class="tick" x="{_LEFT - 7}" y="{y}" dy="0.35em" text-anchor="end">'
            f"{format_tick(tick)}</text>"
        )
    return "".join(parts)


def _x_axis(frame: _PlotFrame, label: str) -> str:
    floor = frame.height - _BOTTOM
    parts = [
        f'<line class="axis" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{floor}" y2="{floor}"/>'
    ]
    for tick in ticks_of(frame.x_low, frame.x_high):
        x = f"{frame.x(tick):.1f}"
        parts.append(
            f'<line class="axis" x1="{x}" x2="{x}" y1="{floor}" y2="{floor + _TICK_LENGTH}"/>'
            f'<text class="tick" x="{x}" y="{floor + 17}" text-anchor="middle">'
            f"{format_tick(tick)}</text>"
        )
    middle = (_LEFT + frame.width - _RIGHT) / 2
    parts.append(
        f'<text class="tick" x="{middle:.1f}" y="{frame.height - 6}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    return "".join(parts)


def _path(
    frame: _PlotFrame, xs: Sequence[float], values: Sequence[float | None], css_class: str
) -> str:
    commands: list[str] = []
    pen_down = False
    for x, value in zip(xs, values, strict=False):
        if value is None or not math.isfinite(value):
            pen_down = False
            continue
        held = min(max(value, frame.y_low), frame.y_high)
        at = f"{frame.x(x):.1f} {frame.y(held):.1f}"
        # A line of zero length is drawn as a dot, so a point between two gaps stays visible.
        commands.append(f"L{at}" if pen_down else f"M{at}h0")
        pen_down = True
    return f'<path class="{css_class}" d="{"".join(commands)}"/>' if commands else ""


def _last_point(frame: _PlotFrame, line: Series) -> str:
    known = [(x, v) for x, v in zip(line.xs, line.values, strict=False) if v is not None]
    if not known:
        return ""
    x, value = known[-1]
    at = f'cx="{frame.x(x):.1f}" cy="{frame.y(value):.1f}"'
    title = f"<title>{escape(line.name)}: {format_metric(value)} at {x:g}</title>"
    return f'<circle class="dot c{_color(line)}" {at} r="3.5">{title}</circle>'


def _svg(
    width: int,
    height: int,
    label: str,
    parts: Sequence[str],
    *,
    css_class: str = "chart",
    stretch: bool = False,
) -> str:
    ratio = ' preserveAspectRatio="none"' if stretch else ""
    return (
        f'<svg class="{css_class}" viewBox="0 0 {width} {height}" role="img"{ratio} '
        f'aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'
    )


def _known(line: Series) -> list[float]:
    values = (*line.values, *line.faint_values)
    return [value for value in values if value is not None and math.isfinite(value)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return (0.0 if 0.0 <= low <= 0.5 * high else low), high


def _color(line: Series) -> int:
    return line.color % NUM_COLORS
