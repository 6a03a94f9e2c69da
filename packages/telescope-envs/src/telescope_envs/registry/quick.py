"""Reads the catalog of a registry in a folder without importing the record models.

Listing and searching run often, and importing the record models takes longer than reading ten
thousand releases. Anything out of the ordinary is left to `lookup.open_registry`, which reports
what is wrong.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import msgspec.toml
from packaging.version import Version

from telescope_envs.records.catalog import (
    CatalogRow,
    NotQuickError,
)
from telescope_envs.records.distributions import version_of
from telescope_envs.records.names import FORMAT_VERSION
from telescope_envs.registry.config import (
    Opening,
    find_address,
)
from telescope_envs.registry.stores.folder import Folder


class Catalog(NamedTuple):
    """A summary of what a registry contains."""

    address: str
    rows: list[CatalogRow]
    aliases: list[str]
    """Bare names."""


class _Config(msgspec.Struct):
    """The fields of config.json that determine whether this client can read the registry."""

    name: str
    format: int = FORMAT_VERSION
    minimum_client: str = "0.1.0"


class _Aliases(msgspec.Struct):
    aliases: dict[str, str] = {}


_CONFIG = msgspec.json.Decoder(_Config)


def quick_catalog(text: str | None = None, opening: Opening | None = None) -> Catalog | None:
    """Return the catalog of the registry `text`; None if it must be opened in full instead."""
    place = find_address(text, opening or Opening())
    if place.scheme != "file":
        return None
    folder = Folder(Path(place.text))
    try:
        config = _CONFIG.decode(folder.read("config.json") or b"")
        aliases = msgspec.toml.decode(folder.read("aliases.toml") or b"", type=_Aliases).aliases
        ours = Version(version_of("telescope-envs") or "0")
        is_ours = config.format == FORMAT_VERSION and ours >= Version(config.minimum_client)
    except (ValueError, RecursionError):
        return None
    try:
        return Catalog(folder.address, folder.catalog(), [*aliases]) if is_ours else None
    except NotQuickError:
        return None
