"""`telescope env list` and `search`: environments here and in the registry, one per line."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from packaging.version import InvalidVersion, Version

from telescope_cli.env.options import JsonOption, RegistryOption, progress
from telescope_core.base.errors import RegistryError, TelescopeError, nearest, unknown_name
from telescope_core.base.terminal import report_width
from telescope_envs.records.catalog import CatalogRow, mark_of
from telescope_envs.records.catalog import search as search_catalog
from telescope_envs.records.installed import installed_environments
from telescope_envs.records.links import AdaptedLink, adapted_links, linked_project, links
from telescope_envs.records.lockfile import find_lock, read_lock
from telescope_envs.registry import Registry, open_registry
from telescope_envs.registry.config import parse_address
from telescope_envs.registry.resolving import notices

_WIDEST_ID = 34


class ListedEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a list."""

    id: str
    version: str | None
    """The newest version in the registry; None if it is not there, or no registry was asked."""
    installed: str | None
    linked: str | None
    """The project folder, if it is linked."""
    locked: str | None
    """Version in the nearest telescope.lock."""
    is_outdated: bool
    """Whether the installed version is older than the registry's newest."""
    deprecated: str
    warnings: tuple[str, ...] = ()
    """Warnings of the registry about the version that is installed or locked here."""
    tags: tuple[str, ...]
    summary: str


def list_environments(
    registry: RegistryOption = None,
    installed: Annotated[
        bool, typer.Option("--installed", help="Only environments installed or linked here.")
    ] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Only environments in the nearest telescope.lock.")
    ] = False,
    outdated: Annotated[
        bool, typer.Option("--outdated", help="Only installed ones that have a newer release.")
    ] = False,
    owner: Annotated[str | None, typer.Option(help="Only environments of this owner.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List environments: installed, linked, locked, and in the registry.

    What was installed from another registry is compared with that one, unless --registry is given.

    Example: telescope env list --installed
    """
    needs_registry = outdated or not (installed or locked)
    opened = open_registry(registry) if needs_registry else None
    published = _published(opened, asks_others=not registry) if opened is not None else {}
    rows = _listed_environments(one.row for one in published.values())
    rows = [_warned(row, published[row.id]) if row.id in published else row for row in rows]
    chosen = [
        row
        for row in rows
        if not (installed and row.installed is None and row.linked is None)
        and not (locked and row.locked is None)
        and not (owner and row.id.partition("/")[0] != owner)
    ]
    wanted = [row for row in chosen if row.is_outdated or not outdated]
    if as_json:
        typer.echo(msgspec.json.encode(wanted).decode())
        return
    owners = {row.id.partition("/")[0] for row in rows}
    if owner and owner not in owners:
        raise unknown_name("owner", owner, owners)
    nothing = "No environment matches; to see all, run: telescope env list"
    compared = [row for row in chosen if row.installed is not None and row.version is not None]
    if outdated and compared:
        nothing = f"Nothing is outdated; installed and compared with a registry: {len(compared)}"
    typer.echo(_table(wanted) or nothing)


def search(
    query: Annotated[
        list[str] | None, typer.Argument(metavar="[QUERY...]", help="Words that must all match.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(help="Only environments with this tag; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of results.")] = 25,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find environments by name, tag and description, best match first.

    Example: telescope env search arithmetic --tag single-turn
    """
    opened = open_registry(registry)
    catalog = opened.catalog()
    words, tags = " ".join(query or ()), tag or ()
    known = {tag for row in catalog for tag in row.tags}
    for one in tags:
        if one.lower() not in {tag.lower() for tag in known}:
            raise unknown_name("tag", one, known)
    found = search_catalog(catalog, words, tags)
    rows = _listed_environments(found[:limit])
    ranks = {row.id: rank for rank, row in enumerate(found[:limit])}
    rows = sorted((row for row in rows if row.id in ranks), key=lambda row: ranks[row.id])
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    elif rows:
        typer.echo(_table(rows))
        if len(found) > limit:
            typer.echo(f"{len(found) - limit} more; add words, or raise --limit")
    else:
        names = {row.id.partition("/")[2]: row.id for row in catalog}
        close = [names[name] for name in nearest(words, names)]
        advice = f"; the nearest names are {', '.join(close)}" if close else ""
        tagged = f" with the tags {', '.join(tags)}" if tags else ""
        nothing = f"Nothing in {opened.address} matches {words!r}{tagged}{advice}"
        typer.echo(f"{nothing}. To see all: telescope env list")


class _Published(NamedTuple):
    """An environment in a registry."""

    registry: Registry
    row: CatalogRow


def _published(default: Registry, *, asks_others: bool) -> dict[str, _Published]:
    """Return what is in `default`, by id; or what is installed as it is in its own registry.

    Other registries are asked only if `asks_others`. One that cannot be read is named on standard
    error, and what was installed from it is left out.
    """
    published = {row.id: _Published(default, row) for row in default.catalog()}
    elsewhere: dict[str, set[str]] = {}
    for found in installed_environments() if asks_others else ():
        if found.registry:
            elsewhere.setdefault(found.registry, set()).add(found.id)
    for address, ids in elsewhere.items():
        try:
            if parse_address(address).is_place_of(parse_address(default.address)):
                continue
            for one in ids:
                published.pop(one, None)
            own = open_registry(address)
            published |= {row.id: _Published(own, row) for row in own.catalog() if row.id in ids}
        except TelescopeError as error:
            named = ", ".join(sorted(ids))
            progress(f"warning: no newest version of {named}, which came from {address}: {error}")
    return published


def _listed_environments(catalog: Iterable[CatalogRow]) -> list[ListedEnvironment]:
    """Return the rows of `catalog` and of local environments that are not in it, sorted by id."""
    here = {
        found.id: _Here(
            found.version, found.summary if found.is_recorded else "not from a registry"
        )
        for found in installed_environments()
    }
    here |= {link.name: _of_adapted(link) for link in adapted_links()}
    linked = {link.id: Path(link.folder) for link in links()}
    path = find_lock()
    entries = read_lock(path).environments if path is not None else ()
    locked = {one.id: one.version for one in entries}
    published = {row.id: row for row in catalog}
    ids = sorted({*published, *here, *locked, *linked})
    return [
        _listed(name, published.get(name), here.get(name), linked.get(name), locked.get(name))
        for name in ids
    ]


def _warned(row: ListedEnvironment, published: _Published) -> ListedEnvironment:
    """Return the row with the registry's warnings about the version that is here."""
    version = row.installed or row.locked
    if version is None or row.linked is not None:
        return row
    try:
        found = notices(published.registry, row.id, version)
    except RegistryError as error:
        found = [str(error)]
    return msgspec.structs.replace(row, warnings=tuple(found))


class _Here(NamedTuple):
    version: str
    summary: str


def _of_adapted(link: AdaptedLink) -> _Here:
    """Return the version of the framework's package, which is the only version."""
    from telescope_envs.install.adapted import framework_version

    needs = ", ".join(link.requirements)
    if not needs:
        return _Here("-", "without a version: a server, or files of a framework")
    return _Here(framework_version(link), f"the version is that of {needs}")


def _listed(
    name: str,
    row: CatalogRow | None,
    here: _Here | None,
    linked: Path | None,
    locked: str | None,
) -> ListedEnvironment:
    version = here.version if here is not None else None
    if row is not None:
        about = row.summary
    else:
        about = here.summary if here else "locked, not installed, not in the registry"
    if linked is not None:
        version, about = _linked_version(name, linked), f"{linked}"
    return ListedEnvironment(
        id=name,
        version=row.version if row is not None else None,
        installed=version,
        linked=str(linked) if linked is not None else None,
        locked=locked,
        is_outdated=row is not None and version is not None and _is_older(version, row.version),
        deprecated=row.deprecated if row is not None else "",
        tags=row.tags if row is not None else (),
        summary=about,
    )


def _linked_version(name: str, folder: Path) -> str:
    """Return the project's current version; "broken" if it is missing, invalid or another one."""
    try:
        return linked_project(name, folder).version
    except TelescopeError:
        return "broken"


def _is_older(version: str, newest: str) -> bool:
    try:
        return Version(version) < Version(newest)
    except InvalidVersion:
        return False


def _table(rows: list[ListedEnvironment]) -> str:
    """Return a table with lines of at most 80 columns; summaries are cut to fit."""
    if not rows:
        return ""
    has_lock = any(row.locked for row in rows)
    cells = [("environment", "newest", "installed", "locked", "about"), *map(_cells, rows)]
    widths = [max(len(row[column]) for row in cells) + 2 for column in range(4)]
    widths[0] = min(widths[0], _WIDEST_ID)
    widths[3] *= has_lock
    return "\n".join(_line(row, widths) for row in cells)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    shown = [f"{cell:<{width}}" for cell, width in zip(cells[:4], widths, strict=True) if width]
    line = "".join(text if text.endswith(" ") else f"{text} " for text in shown)
    room = max(report_width() - len(line), 0)
    about = cells[4]
    return (line + (about if len(about) <= room else f"{about[: max(room - 3, 0)]}...")).rstrip()


def _cells(row: ListedEnvironment) -> tuple[str, ...]:
    mark = f"{mark_of(row.deprecated)} " if row.deprecated else ""
    mark = f"({row.warnings[0].removeprefix(row.id).lstrip(': ')}) " if row.warnings else mark
    here = row.installed or "-"
    here = f"{here} linked" if row.linked else here
    return (
        row.id,
        row.version or "-",
        here,
        row.locked or "-",
        f"{mark}{row.summary}",
    )
