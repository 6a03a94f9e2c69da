"""Curves as text: `sparkline` in one line, `columns` in several; and their moving average."""

import math
from collections.abc import Sequence
from itertools import pairwise

_BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))
"""Eight bars of rising height."""


def sparkline(values: Sequence[float | None], *, width: int = 40) -> str:
    """Return `values` as bars, averaged into at most `width` of them; gaps become spaces."""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    cells = [_mean(values[start:end]) for start, end in pairwise(edges)]
    known = [value for value in cells if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return "".join(" " if value is None else _bar(value, low, high) for value in cells)


def columns(values: Sequence[float | None], *, height: int, high: float) -> list[str]:
    """Return lines of text, the upper ones first, with a column from 0 for each value.

    `high` is where the highest line ends. A column is empty only if its value is 0 or missing.
    """
    levels = [
        0
        if value is None or value <= 0
        else max(1, round(min(1.0, value / high) * height * len(_BLOCKS)))
        for value in values
    ]
    lines: list[str] = []
    for line in range(height - 1, -1, -1):
        below = line * len(_BLOCKS)
        lines.append("".join(_block(level - below) for level in levels))
    return lines


def _block(level: int) -> str:
    return " " if level <= 0 else _BLOCKS[min(level, len(_BLOCKS)) - 1]


def moving_average(values: Sequence[float | None], *, window: int) -> list[float | None]:
    """Return the mean of each value and up to `window` - 1 values before it, ignoring gaps."""
    smooth: list[float | None] = []
    for end in range(1, len(values) + 1):
        smooth.append(_mean(values[max(0, end - window) : end]))
    return smooth


def _bar(value: float, bottom: float, top: float) -> str:
    if top <= bottom:
        return _BLOCKS[0]
    level = (value - bottom) / (top - bottom) * len(_BLOCKS)
    return _BLOCKS[max(0, min(len(_BLOCKS) - 1, int(level)))]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
