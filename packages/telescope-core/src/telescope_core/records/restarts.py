"""Restarts of trainer ranks that died: the lines of `restarts.jsonl` in a run folder."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart of the run from a checkpoint, in the same process."""

    time_s: float
    """Seconds since 1970, UTC."""
    reason: str
    """The processes that died."""
    reached: int
    """Number of steps that had been taken."""
    step: int
    """Number of steps that are kept; later ones are taken again."""
    checkpoint: str
    """Folder of the checkpoint; empty = the initial weights."""
