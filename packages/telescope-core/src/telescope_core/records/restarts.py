"""When trainer ranks died and were started again: the lines of `restarts.jsonl` in a run folder."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The run goes on from a checkpoint, in the same process."""

    time_s: float
    """Seconds since 1970, UTC."""
    reason: str
    """What died."""
    reached: int
    """Steps that were done."""
    step: int
    """Steps that are kept; those after it are taken again."""
    checkpoint: str
    """The folder that the run goes on from; empty = from the weights it began with."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Restart":
        """Return what a line of `restarts.jsonl` says."""
        values: dict[str, Any] = {field.name: row[field.name] for field in fields(cls)}
        return cls(**values)
