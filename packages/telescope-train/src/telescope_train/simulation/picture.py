"""Draw a simulated run over time: as text of 80 columns, and as a page.

Both show shares on a scale from 0 to 100% and numbers on one from 0 to the highest that is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from telescope_core.records.files import write_text
from telescope_core.reports.html import facts, figure, page, table
from telescope_core.reports.sparkline import columns
from telescope_core.reports.svg import Series, line_chart
from telescope_train.simulation.estimate import Course, Estimate, table_of
from telescope_train.simulation.run import Usage

_WIDTH, _LEAST_CELLS = 80, 4
_NAME, _TICK, _NOTE = 14, 6, 10
"""Characters of a name, and of a number at the axis and one beside it, which may need more."""


@dataclass(frozen=True, slots=True)
class _Span:
    from_s: float
    to_s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """One value that changes over time."""

    name: str
    spans: Sequence[_Span]
    is_share: bool = False

    @property
    def mean(self) -> float:
        """Mean over time."""
        seconds = sum(one.to_s - one.from_s for one in self.spans)
        return sum(one.value * (one.to_s - one.from_s) for one in self.spans) / (seconds or 1.0)

    def text(self, value: float) -> str:
        """Return `value` as text beside the curve."""
        if self.is_share:
            return f"{value:.0%}"
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def lines_of(course: Course, width: int = _WIDTH) -> list[str]:
    """Return a picture of at most 80 columns; each column is the mean of its part of the time.

    `width`: the columns of the terminal. Numbers are never cut, so it may be too small for them.
    """
    duration_s = course.usage[-1].to_s
    curves = list(_curves(course))
    drawn = [one for one in curves if one.is_share or any(span.value for span in one.spans)]
    tick = max(_TICK, *(len(one.text(max(s.value for s in one.spans))) for one in drawn))
    note = max(_NOTE, *(len(f"mean {one.text(one.mean)}") for one in drawn))
    cells = max(_LEAST_CELLS, min(width, _WIDTH) - _NAME - tick - note - 2)
    lines: list[str] = []
    for curve in curves:
        if curve in drawn:
            lines += _drawn(curve, duration_s, tick=tick, cells=cells)
        else:
            lines.append(f"{curve.name:<{_NAME}}{'0':>{tick}} at all times")
    left = " " * (_NAME + tick + 1)
    lines.append(f"{left}0 s{_seconds(duration_s):>{cells - 3}}")
    return lines


def write_page(path: Path, estimate: Estimate, *, title: str) -> None:
    """Write everything as a separate page."""
    curves = {curve.name: curve for curve in _curves(estimate.course)}
    one = estimate.chosen
    rows = [
        [
            f"{row.num_servers}",
            f"{row.num_ranks}",
            f"{row.step_s:.1f}",
            f"{row.steps_per_hour:,.0f}",
            f"{row.servers_idle:.0%}",
            f"{row.trainer_idle:.0%}",
        ]
        for row in table_of(estimate)
    ]
    head = ["servers", "trainer GPUs", "s a step", "steps/h", "servers idle", "trainer idle"]
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts(
            [
                (f"{one.steps_per_hour:,.0f}", "steps an hour"),
                (f"{one.step_s:.1f} s", "a step"),
                (f"{one.servers_idle:.0%}", "servers idle"),
                (f"{one.trainer_idle:.0%}", "trainer idle"),
                (f"{one.staleness_mean:.2f}", "staleness, mean"),
            ]
        ),
        _figure("Share of the time in use", [curves["servers busy"], curves["ranks busy"]]),
        _figure("What waits", [curves["slot queue"], curves["server queue"]]),
        _figure("Groups that have ended and wait for the trainer", [curves["groups ready"]]),
        _figure("Weight updates between sampling and training", [curves["staleness"]]),
        "<h2>Divisions of the GPUs</h2>",
        table(head, rows, num_text_columns=0),
    ]
    write_text(path, page(title, parts))


def _curves(course: Course) -> list[_Curve]:
    def of(name: str, value: Callable[[Usage], float], *, is_share: bool = False) -> _Curve:
        spans = [_Span(one.from_s, one.to_s, value(one)) for one in course.usage]
        return _Curve(name=name, spans=spans, is_share=is_share)

    return [
        of("servers busy", lambda one: one.servers_busy, is_share=True),
        of("ranks busy", lambda one: one.ranks_busy, is_share=True),
        of("slot queue", lambda one: one.rollouts_waiting),
        of("server queue", lambda one: one.requests_waiting),
        of("groups ready", lambda one: one.groups_ready),
        _Curve(name="staleness", spans=list(_staleness(course))),
    ]


def _staleness(course: Course) -> Iterator[_Span]:
    from_s = 0.0
    for step in course.steps:
        yield _Span(from_s, step.ended_s, step.staleness_mean)
        from_s = step.ended_s


def _drawn(curve: _Curve, duration_s: float, *, tick: int, cells: int) -> list[str]:
    values = _cells(curve.spans, duration_s, cells)
    high = 1.0 if curve.is_share else max(value for value in values if value is not None)
    drawn = columns(values, height=3 if curve.is_share else 2, high=high)
    names = [curve.name, *[""] * (len(drawn) - 1)]
    ticks = [curve.text(high), *[""] * (len(drawn) - 2), "0"]
    notes = [f"mean {curve.text(curve.mean)}", *[""] * (len(drawn) - 1)]
    return [
        f"{name:<{_NAME}}{number:>{tick}} {line} {note}".rstrip()
        for name, number, line, note in zip(names, ticks, drawn, notes, strict=True)
    ]


def _cells(spans: Sequence[_Span], duration_s: float, count: int) -> list[float | None]:
    """Return the mean over time in each of `count` equal parts; None where unknown."""
    sums, seconds = [0.0] * count, [0.0] * count
    cell_s = duration_s / count
    for one in spans:
        for cell in range(int(one.from_s / cell_s), min(count, int(one.to_s / cell_s) + 1)):
            inside_s = min(one.to_s, (cell + 1) * cell_s) - max(one.from_s, cell * cell_s)
            if inside_s > 0:
                sums[cell] += inside_s * one.value
                seconds[cell] += inside_s
    return [total / of if of else None for total, of in zip(sums, seconds, strict=True)]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 36_000 else f"{seconds / 3600:,.1f} h"


def _figure(title: str, curves: Sequence[_Curve]) -> str:
    series = [
        Series(
            name=curve.name,
            xs=[one.to_s for one in curve.spans],
            values=[100 * one.value if curve.is_share else one.value for one in curve.spans],
            color=color,
        )
        for color, curve in enumerate(curves)
    ]
    highest = max((v for one in series for v in one.values if v is not None), default=0.0)
    chart = line_chart(
        series,
        label=title,
        x_label="seconds of the simulated run",
        y_range=(0.0, 100.0 if curves[0].is_share else highest or 1.0),
        size=(960, 260),
        with_legend=True,
    )
    return figure(f"{title}, %" if curves[0].is_share else title, chart)
