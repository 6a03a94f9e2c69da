"""What several verbs of `telescope env` share: options, and the completion of names."""

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from telescope_envs.installed import installed_environments
from telescope_envs.linked import links
from telescope_envs.registry.lookup import open_registry

RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="REGISTRY",
        help="Name, folder or address of the registry to use instead of the default.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
NoLockOption = Annotated[
    bool, typer.Option("--no-lock", help="Neither read nor write telescope.lock.")
]
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Use no network: wheels and packages from caches alone.")
]
AllowSdistOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-sdist",
        metavar="PACKAGE,...",
        help="Build these dependencies from source, which runs their code while installing.",
    ),
]


def complete_name(incomplete: str) -> list[str]:
    """Return the registry's names that begin so."""
    registry = open_registry()
    names = [*registry.aliases(), *registry.ids()]
    return sorted(name for name in names if name.startswith(incomplete))


def complete_installed(incomplete: str) -> list[str]:
    """Return the installed names that begin so."""
    names = {environment.name for environment in installed_environments()}
    names |= {link.name for link in links()}
    return sorted(name for name in names if name.startswith(incomplete))


OptionalNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME[@VERSION]...",
        help="name or owner/name; @ a version, a range or sha256:...",
        autocompletion=complete_name,
    ),
]
InstalledNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...]",
        help="Installed environments; all of them by default.",
        autocompletion=complete_installed,
    ),
]


def with_bare_names(ids: Iterable[str]) -> set[str]:
    """Return the ids, and their names without owners: all that a person may type."""
    known = list(ids)
    return {*known, *(one.partition("/")[2] or one for one in known)}


def progress(step: str) -> None:
    """Tell a person what is happening now."""
    sys.stderr.write(f"{step}\n")


def split_names(given: list[str] | None) -> tuple[str, ...]:
    """Return the names in an option that takes several, with commas or repeated."""
    return tuple(name.strip() for text in given or () for name in text.split(",") if name.strip())
