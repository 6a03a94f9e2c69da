"""Pages, hits, and what a search backend has to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from telescope_core.base.errors import EndpointError


class SearchError(EndpointError):
    """A search backend failed; the rollout fails and has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page of a corpus or of the web."""

    address: str
    """What it is opened by: a URL, or an id in the corpus."""
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One result of a search."""

    address: str
    title: str
    snippet: str
    """A few words of the page."""


class SearchBackend(Protocol):
    """Where pages are searched and read; failures raise SearchError and are never empty results."""

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        """Return at most `limit` hits, best first."""
        ...

    async def page(self, address: str) -> Page | None:
        """Return the page at `address`; None if there is none."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
