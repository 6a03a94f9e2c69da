"""One row per environment: what listing and searching show, small enough to hold all of them."""

import msgspec


class CatalogRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest release of one environment that is not yanked, in short."""

    id: str
    """`owner/name`."""
    version: str
    summary: str
    tags: tuple[str, ...] = ()
    license: str = ""
    published_at: str = ""
    """ISO 8601."""
    verdict: str = "none"
    deprecated: str = ""
    """The reason; empty = it is not."""
    num_releases: int = 1
