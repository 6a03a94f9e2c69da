"""Which registry is meant: nothing is opened here.

In order: the one that was named, `TELESCOPE_REGISTRY`, the user's file, the `registry/` of the
enclosing checkout, the snapshot in this package.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from telescope_envs.addresses import Address, parse_address
from telescope_envs.user_config import read_user_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How registries are opened."""

    offline: bool = False
    """Whether to read only what was fetched before."""
    tell: Callable[[str], None] = lambda message: None
    """Is told what a person should know, such as how old what is read offline is."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    working_directory: Path | None = None
    """None: the current one."""


def find_address(text: str | None, opening: Opening) -> Address:
    """Return where the registry is that `text` means; None: the default one."""
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
