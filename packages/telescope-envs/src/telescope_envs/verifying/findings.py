"""`Finding`: what `env verify` saw, and whether it is wrong."""

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """What was found; all but NOTE make the verification fail."""

    CHANGED = "changed"
    """A file is not the one that was installed."""
    MISSING = "missing"
    """A file or a package is gone."""
    EXTRA = "extra"
    """Something is there that nobody installed."""
    LOCK = "lock"
    """What is installed is not what is locked."""
    REGISTRY = "registry"
    """The registry has another wheel under that version, or none."""
    YANKED = "yanked"
    """The registry took the version back, or warns of it."""
    NOTE = "note"
    """Worth knowing, not wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    kind: FindingKind
    what: str
    """The file, package or version."""
    text: str
    """What is wrong with it, and what to do."""

    @property
    def is_problem(self) -> bool:
        """Whether the verification fails for it."""
        return self.kind is not FindingKind.NOTE
