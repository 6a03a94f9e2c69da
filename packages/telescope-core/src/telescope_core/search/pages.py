"""Pages, hits, and the protocol of search backends."""

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
    """Address for opening it: a URL, or an id in the corpus."""
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
    """Searches and reads pages; raises SearchError on failure and never returns nothing instead."""

    async def search(self, query: str, limit: int) -> Sequence[Hit]:
        """Return at most `limit` hits, best first."""
        ...

    async def page(self, address: str) -> Page | None:
        """Return the page at `address`; None if there is none."""
        ...

    async def close(self) -> None:
        """Release connections. Idempotent."""
        ...
