"""Progress of long commands: nothing for short ones, lines where there is no terminal."""

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from telescope_cli import progress
from telescope_cli.progress import progress_of, waiting


def shown(*moments: tuple[float, int], is_terminal: bool = False) -> str:
    """Return what is shown for steps that are done so many seconds after the beginning."""
    passed_s = 0.0
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
    with progress_of("simulating", console=console, clock=lambda: 500.0 + passed_s) as on_progress:
        for passed_s, done in moments:  # noqa: B007 - the clock reads it
            on_progress(done, 100)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_is_done_within_two_seconds_shows_nothing() -> None:
    assert shown((0.5, 10), (1.9, 100)) == ""


def test_after_two_seconds_there_is_a_line_even_if_nothing_is_done() -> None:
    (line,) = shown((1.0, 0), (2.1, 0)).splitlines()
    assert line.startswith("simulating: ")
    assert re.findall(r"\d+", line) == ["0", "100", "2"], "steps done, all steps, seconds"


def test_a_terminal_gets_a_bar_with_the_same_numbers_once_it_takes_long() -> None:
    assert shown((1.9, 10), is_terminal=True) == ""
    assert "30 of 100" in shown((1.0, 10), (2.1, 20), (2.2, 30), is_terminal=True)


def test_a_terminal_that_cannot_redraw_gets_the_lines(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    (line,) = shown((1.0, 0), (2.1, 20), is_terminal=True).splitlines()
    assert "20 of 100" in line


def test_further_lines_come_every_ten_seconds() -> None:
    text = shown((2.0, 5), (5.0, 10), (11.9, 20), (12.0, 30), (21.0, 40), (30.0, 50))
    assert [line.split(":")[1].split()[0] for line in text.splitlines()] == ["5", "30", "50"]


class Screen(io.StringIO):
    """A terminal, and whether the text that is waited for has been shown on it."""

    def __init__(self) -> None:
        super().__init__()
        self.shows = threading.Event()
        self.console = Console(file=self, width=80, force_terminal=True)

    def write(self, text: str) -> int:
        written = super().write(text)
        if "reading the model" in text:
            self.shows.set()
        return written


def test_a_terminal_shows_what_takes_long_and_clears_it_again(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    screen, old = Screen(), (sys.stdout, sys.stderr)
    with waiting("reading the model", console=screen.console):
        assert screen.shows.wait(60)
        sys.stderr.write("a remark\n")
        assert sys.stdout is old[0], "it may be a file"
    assert (sys.stdout, sys.stderr) == old
    assert "a remark" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the line is cleared"


def test_what_is_over_before_that_shows_nothing(monkeypatch) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 600.0)
    screen = Screen()
    with waiting("reading the model", console=screen.console):
        pass
    assert screen.getvalue() == ""


@pytest.mark.parametrize("terminal", ["none", "dumb"])
def test_nothing_is_shown_where_it_could_not_be_cleared(monkeypatch, terminal) -> None:
    monkeypatch.setattr(progress, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setenv("TERM", terminal)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal == "dumb")
    with waiting("reading the model", console=console):
        pass
    assert out.getvalue() == ""
