"""What a part of `make gpu-check` is: a name, a limit, what it needs, and what it found."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part found."""

    text: str
    is_met: bool | None
    """Whether that keeps the limit; None = the part could not run, and `text` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part. Those after it run in the same process, unless it fails or does not end."""

    name: str
    limit: str
    run: Callable[[], Found]
    num_gpus: int = 0
    """GPUs that it needs."""
    seconds: int = 120
    """Longest that it may take; the limit is missed then."""


def within(text: str, value: float, most: float) -> Found:
    """Return whether `value` is at most `most`; one that is not a number is not."""
    return Found(text=text, is_met=value <= most)


def left_out(why: str) -> Found:
    """Return that a part could not run."""
    return Found(text=why, is_met=None)
