"""Options and name completion shared by several verbs of `telescope env`."""

import sys
from typing import Annotated, Any

import typer

from telescope_cli.eval.flags import unparsed
from telescope_core.base.errors import ConfigError
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.links import links
from telescope_envs.registry import open_registry

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
    bool, typer.Option("--offline", help="Use no network: take wheels and packages from caches.")
]
AllowSdistOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-sdist",
        metavar="PACKAGE,...",
        help="Build these dependencies where they have no wheel, which runs their code.",
    ),
]
ExamplesOption = Annotated[
    int, typer.Option("--examples", min=1, max=1000, help="Examples to try from each split.")
]
FixtureRowsOption = Annotated[
    bool,
    typer.Option(
        "--fixture-rows",
        help="Check it on the project's own rows (fixture-rows/) in the place of its datasets.",
    ),
]


def given_settings(context: typer.Context) -> dict[str, Any]:
    """Return the settings in `--env.NAME VALUE` flags; raises ConfigError for further arguments."""
    left = unparsed(context)
    if left.environments:
        raise ConfigError(
            f"expected one environment, got also {left.environments[0]!r}; run this once for each"
        )
    return left.settings


def complete_name(incomplete: str) -> list[str]:
    """Return the names in the registry that begin with `incomplete`."""
    opened = open_registry()
    names = [*opened.aliases(), *opened.ids()]
    return sorted(name for name in names if name.startswith(incomplete))


def complete_installed(incomplete: str) -> list[str]:
    """Return the installed names that begin with `incomplete`."""
    ids = [one.id for one in [*installed_environments(), *links()]]
    names = {one.rpartition("/")[2] for one in ids}
    return sorted(name for name in names if name.startswith(incomplete))


TriedArgument = Annotated[
    str,
    typer.Argument(
        metavar="[DIR|NAME|WHEEL]",
        help="A project folder, an installed name, or a wheel.",
        autocompletion=complete_installed,
    ),
]
OptionalNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME[@VERSION]...",
        help="name or owner/name; after @, a version, a range or sha256:...",
        autocompletion=complete_name,
    ),
]


def progress(step: str) -> None:
    """Print a progress message to standard error."""
    sys.stderr.write(f"{step}\n")


def split_names(given: list[str] | None) -> tuple[str, ...]:
    """Return the names in an option that is repeated or takes names separated by commas."""
    return tuple(name.strip() for text in given or () for name in text.split(",") if name.strip())
