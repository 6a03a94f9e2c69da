"""What the consoles of reports print: texts of others, and tables on narrow terminals."""

import io
from types import SimpleNamespace

import pytest
from rich import box
from rich.table import Table

from telescope_cli.console import EscapingConsole, print_table
from telescope_core.base.terminal import report_width


def printed(width: int) -> str:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("measure")
    for name in ("before", "after", "95% interval"):
        table.add_column(name, justify="right")
    table.add_row("a measure with a name of many words", "0.350", "0.608", "+0.101 to +0.400")
    shown = EscapingConsole(file=io.StringIO(), width=width)
    print_table(shown, table)
    return shown.file.getvalue()


@pytest.mark.parametrize("width", [20, 30, 40, 50, 60, 79, 80])
def test_a_table_cuts_no_number(width):
    text = printed(width)
    assert all(
        number in " ".join(text.split()) for number in ("0.350", "0.608", "+0.101 to +0.400")
    )
    assert max(map(len, text.splitlines())) <= width


def test_a_table_without_room_is_a_list():
    assert "before: 0.350" in printed(40)
    assert "before: 0.350" not in printed(60)


def test_texts_of_others_are_escaped_and_styles_stay():
    shown = EscapingConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    shown.print("esc\x1b[31mred", style="bold", highlight=False, markup=False)
    text = shown.file.getvalue()
    assert r"esc\u001b[31mred" in text
    assert text.startswith("\x1b[1m")


@pytest.mark.parametrize(
    ("columns", "is_terminal", "expected"),
    [("40", True, 40), ("200", True, 80), ("40", False, 80), ("5", True, 20)],
)
def test_a_report_fits_a_narrow_terminal(monkeypatch, columns, is_terminal, expected):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: is_terminal))
    assert report_width() == expected
