"""Reduce curves to few points for drawing, without losing a peak. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telescope_ui.base.answers import JsonObject

_MOST_SMOOTHED = 20
"""Most steps in the moving average of a long run, as in reports."""


class Thinned(NamedTuple):
    """The positions of a curve that are kept."""

    positions: list[int]
    is_thinned: bool


def thinned(columns: Sequence[Sequence[float]], num: int, *, points: int) -> Thinned:
    """Return at most `points` of the positions 0 .. num - 1.

    The first and last position of each stretch are kept, and those of the lowest and highest value
    of every column. Values that are not numbers are ignored.
    """
    if num <= points:
        return Thinned(list(range(num)), False)
    stretches = max(1, points // (2 + 2 * len(columns)))
    kept: set[int] = set()
    for stretch in range(stretches):
        first, end = stretch * num // stretches, (stretch + 1) * num // stretches
        kept |= {first, end - 1}
        for column in columns:
            part = column[first:end]
            known = part if not math.isnan(sum(part)) else [one for one in part if one == one]
            if known:
                kept |= {first + part.index(min(known)), first + part.index(max(known))}
    return Thinned(sorted(kept), True)


class Drawn(NamedTuple):
    """The part of curves to draw, and the settings for it."""

    points: int
    """Most positions of each curve."""
    first: int | None = None
    last: int | None = None
    """First and last step of the part, both included; None = no limit on that side."""
    smooth: int | None = None
    """Steps of the moving average; None = as in reports, 1 = no average."""

    def window(self, num_steps: int) -> int:
        """Return the steps of the moving average for a run of that length."""
        return self.smooth or max(1, min(_MOST_SMOOTHED, num_steps // 10))

    def part(self, steps: Sequence[int]) -> list[int]:
        """Return the positions of the steps to draw."""
        first, last = self.first, self.last
        return [
            at
            for at, step in enumerate(steps)
            if (first is None or step >= first) and (last is None or step <= last)
        ]


def smoothed(values: Sequence[float], window: int, positions: Sequence[int]) -> list[float]:
    """Return the mean of the values at `positions` and up to `window` - 1 before each, without NaN.

    A missing value gives a missing mean, so that a gap stays one.
    """
    found: list[float] = []
    for at in positions:
        known = [one for one in values[max(0, at + 1 - window) : at + 1] if not math.isnan(one)]
        found.append(math.nan if math.isnan(values[at]) else math.fsum(known) / len(known))
    return found


def curve(steps: Sequence[int], values: Sequence[float], *, points: int) -> JsonObject:
    """Return one curve."""
    found = shared_curves(steps, {"": values}, Drawn(points, smooth=1))
    return {
        **{name: found[name] for name in ("steps", "is_thinned")},
        "values": found["metrics"][""],
    }


def shared_curves(
    steps: Sequence[int], metrics: Mapping[str, Sequence[float]], drawn: Drawn
) -> JsonObject:
    """Return several curves over the same steps, and their moving averages if those differ.

    A step without a value of a metric has NaN there, so that every page shows the same gaps.
    """
    window = drawn.window(len(steps))
    part = drawn.part(steps)
    own = [
        values if len(part) == len(steps) else [values[at] for at in part]
        for values in metrics.values()
    ]
    kept = thinned(own, len(part), points=drawn.points)
    positions = [part[at] for at in kept.positions]
    # Of long runs most positions are not kept, and an average is the costly part of a curve.
    smooth = {
        name: smoothed(values, window, positions) for name, values in metrics.items() if window > 1
    }
    return {
        "steps": [steps[at] for at in positions],
        "metrics": {name: [values[at] for at in positions] for name, values in metrics.items()},
        "smooth": smooth,
        "smooth_steps": window,
        "is_thinned": kept.is_thinned,
    }
