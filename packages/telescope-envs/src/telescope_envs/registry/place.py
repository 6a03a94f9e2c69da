"""What a kind of store is given to open itself with: one place, and how it is to be read."""

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
    """One registry that is not a folder, before anything was asked of it."""

    address: Address
    token: Token | None
    """For the host and port of the address, and for no other."""
    login_hint: str
    """What a person does when the place asks for a token."""
    cache: Path
    """Folder for what was fetched; may not exist."""
    offline: bool
    tell: Callable[[str], None]

    def remark(self, message: str) -> None:
        """Say what a person should know and cannot see."""
        self.tell(f"{self.address.text}: {message}")

    def remark_age(self, confirmed_at: float) -> None:
        """Say how old what is read offline is; seconds since the epoch."""
        age = age_text(time.time() - confirmed_at)
        moment = datetime.fromtimestamp(confirmed_at, UTC)
        self.remark(f"offline, as of {age} ago ({moment:%Y-%m-%d %H:%M} UTC)")


def age_text(seconds: float) -> str:
    """Return a time that has passed in the largest unit of which there are two."""
    for size_s, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} seconds"


Opener = Callable[[Place], Store]
"""What an entry point of `telescope.registries` is: scheme of addresses -> opens one."""
