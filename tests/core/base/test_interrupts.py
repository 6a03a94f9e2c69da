"""Signals that come where an exception would be lost."""

import signal
import sys
import time
import weakref
from collections.abc import Callable

import pytest

from telescope_core.base import interrupts
from telescope_core.base.interrupts import Interrupted, taken

LONG_S = 600.0
"""More than any signal needs; whoever is not ended fails the test with it."""


class Signals:
    """An object whose end takes a while, in which a signal comes."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def __del__(self) -> None:
        ends(self.steps)


def ends(steps: list[str]) -> None:
    steps.append("began")
    signal.raise_signal(signal.SIGINT)
    steps.append("ended")


def destructor(steps: list[str]) -> None:
    Signals(steps)


def callback(steps: list[str]) -> None:
    weakref.finalize(type("Watched", (), {})(), ends, steps)


def works(ending: Callable[[list[str]], None], steps: list[str]) -> None:
    ending(steps)
    steps.append("went on")
    time.sleep(LONG_S)
    steps.append("was never ended")


@pytest.mark.parametrize("ending", [destructor, callback])
def test_one_in_a_destructor_ends_what_comes_after_it(ending, monkeypatch, capfd):
    """Python would print an exception there, and go on as if nobody had asked."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    steps: list[str] = []
    with taken(), pytest.raises(Interrupted, match="SIGINT"):
        works(ending, steps)
    assert (steps, lost) == (["began", "ended", "went on"], [])
    assert capfd.readouterr().err == "telescope: stopping (SIGINT) ...\n"


def test_a_destructor_that_does_not_end_is_ended(monkeypatch):
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(interrupts, "_MOST_PUT_OFF", 3)

    class Stays:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            time.sleep(LONG_S)
            lost.append("it went on")

    with taken():
        Stays()
    (found,) = lost
    assert isinstance(found.exc_value, Interrupted)
