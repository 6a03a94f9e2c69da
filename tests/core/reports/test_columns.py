"""Columns of text: their heights are the values, on a scale that begins at 0."""

from hypothesis import given
from hypothesis import strategies as st

from telescope_core.reports.sparkline import columns

BLOCKS = " " + "".join(chr(code) for code in range(0x2581, 0x2589))


def heights(lines: list[str]) -> list[int]:
    """Return the height of each column in eighths of a line."""
    return [sum(BLOCKS.index(line[place]) for line in lines) for place in range(len(lines[0]))]


def test_columns_fill_from_below() -> None:
    assert columns([0.0, 1.0, 2.0, None], height=2, high=2.0) == [
        f"  {BLOCKS[8]} ",
        f" {BLOCKS[8]}{BLOCKS[8]} ",
    ]


@given(st.lists(st.floats(0.0, 1.0), min_size=1), st.integers(1, 4))
def test_heights_are_the_values_and_only_nothing_is_empty(values: list[float], height: int) -> None:
    found = heights(columns(values, height=height, high=1.0))
    for value, tall in zip(values, found, strict=True):
        assert abs(tall - value * height * 8) <= 1
        assert (tall == 0) == (value == 0)


def test_what_is_above_the_scale_ends_with_it() -> None:
    assert heights(columns([5.0], height=3, high=1.0)) == [24]
