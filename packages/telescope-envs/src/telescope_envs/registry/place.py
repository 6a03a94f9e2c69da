"""Defines `Place`: what a store for a remote registry needs to open it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from telescope_envs.addresses import Address
from telescope_envs.credentials import Token
from telescope_envs.registry.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A remote registry that is not opened yet."""

    address: Address
    token: Token | None
    """Sent only to the host and port of the address."""
    login_hint: str
    """Advice to the user when the registry requires a token."""
    cache: Path
    """Folder for cached files; may not exist."""
    offline: bool
    tell: Callable[[str], None]

    def remark(self, message: str) -> None:
        """Tell the user `message`, prefixed with the address."""
        self.tell(f"{self.address.text}: {message}")

    def remark_age(self, confirmed_at: float) -> None:
        """Tell the user the age of files read offline; `confirmed_at` is in epoch seconds."""
        age = age_text(time.time() - confirmed_at)
        moment = datetime.fromtimestamp(confirmed_at, UTC)
        self.remark(f"offline, as of {age} ago ({moment:%Y-%m-%d %H:%M} UTC)")


def age_text(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least two."""
    for size_s, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} seconds"


Opener = Callable[[Place], Store]
"""Type of the entry points in `telescope.registries`: opens a registry of one address scheme."""
