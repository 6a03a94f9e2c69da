"""Curves with few enough points to be drawn, in which no peak is lost. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from telescope_ui.base.answers import JsonObject


class Thinned(NamedTuple):
    """Which positions of a curve are kept."""

    positions: list[int]
    is_thinned: bool


def thinned(columns: Sequence[Sequence[float]], num: int, *, points: int) -> Thinned:
    """Return at most `points` of the positions 0 .. num - 1.

    Of each stretch, the first, the last, and the lowest and highest of every column are kept.
    Values that are not numbers are passed over.
    """
    if num <= points:
        return Thinned(list(range(num)), False)
    stretches = max(1, points // (2 + 2 * len(columns)))
    kept: set[int] = set()
    for stretch in range(stretches):
        first, end = stretch * num // stretches, (stretch + 1) * num // stretches
        kept |= {first, end - 1}
        for column in columns:
            known = [at for at in range(first, end) if not math.isnan(column[at])]
            if known:
                kept |= {min(known, key=column.__getitem__), max(known, key=column.__getitem__)}
    return Thinned(sorted(kept), True)


def curve(steps: Sequence[int], values: Sequence[float], *, points: int) -> JsonObject:
    """Return one curve; steps without a value are left out."""
    known = [at for at, value in enumerate(values) if not math.isnan(value)]
    column = [values[at] for at in known]
    kept = thinned([column], len(known), points=points)
    return {
        "steps": [steps[known[at]] for at in kept.positions],
        "values": [column[at] for at in kept.positions],
        "is_thinned": kept.is_thinned,
    }


def shared_curves(
    steps: Sequence[int], metrics: Mapping[str, Sequence[float]], *, points: int
) -> JsonObject:
    """Return several curves over the same steps."""
    kept = thinned(list(metrics.values()), len(steps), points=points)
    return {
        "steps": [steps[at] for at in kept.positions],
        "metrics": {
            name: [values[at] for at in kept.positions] for name, values in metrics.items()
        },
        "is_thinned": kept.is_thinned,
    }
