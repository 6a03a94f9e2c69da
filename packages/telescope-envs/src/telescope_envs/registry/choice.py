"""Chooses which registry to use, without opening it.

The first of these that exists is used: the registry that was named, `TELESCOPE_REGISTRY`, the
default in the user's config file, the `registry/` folder of the enclosing checkout, and the
snapshot in this package.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from telescope_envs.addresses import Address, parse_address
from telescope_envs.user_config import read_user_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Options for opening a registry."""

    offline: bool = False
    """Whether to read only files that were fetched before."""
    tell: Callable[[str], None] = lambda message: None
    """Called with messages for the user, such as the age of files that are read offline."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    working_directory: Path | None = None
    """None means the current working directory."""


def find_address(text: str | None, opening: Opening) -> Address:
    """Return the address of the registry that `text` names; None means the default registry."""
    config = read_user_config(opening.environ)
    if text:
        return config.place_of(text)
    chosen = config.default(opening.environ)
    if chosen is not None:
        return chosen
    for start in (opening.working_directory or Path.cwd(), Path(__file__).resolve()):
        for folder in (start, *start.parents):
            if (folder / "registry" / "index").is_dir():
                return parse_address(str(folder / "registry"))
    return parse_address(str(Path(__file__).resolve().parent.parent / "snapshot"))
