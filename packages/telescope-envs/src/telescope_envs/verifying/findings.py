"""`Finding`: one thing that `env verify` found, and whether it is a problem."""

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """What was found; all but NOTE make the verification fail."""

    CHANGED = "changed"
    """A file is not the one that was installed."""
    MISSING = "missing"
    """A file or a package is gone."""
    EXTRA = "extra"
    """A file is there that no package installed."""
    LOCK = "lock"
    """What is installed differs from what is locked."""
    REGISTRY = "registry"
    """The registry has another wheel under that version, or none."""
    YANKED = "yanked"
    """The version was yanked, or there is an advisory about the environment."""
    NOTE = "note"
    """Worth knowing, but not a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: FindingKind
    what: str
    """The file, package or version."""
    text: str
    """What is wrong with it and what to do, as the predicate of a sentence about `what`."""

    @property
    def is_problem(self) -> bool:
        """Whether it makes the verification fail."""
        return self.kind is not FindingKind.NOTE
