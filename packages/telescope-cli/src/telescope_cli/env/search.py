"""`telescope env search`."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from telescope_cli.env.listing import listed_environments, table
from telescope_cli.env.options import JsonOption, RegistryOption, read_catalog
from telescope_core.base.errors import nearest, unknown_name
from telescope_envs.records.catalog import CatalogRow
from telescope_envs.records.catalog import search as search_catalog


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

    Example: telescope env search arithmetic --tag math
    """
    opened, catalog = read_catalog(registry)
    words, tags = " ".join(query or ()), tag or ()
    known = {tag for row in catalog for tag in row.tags}
    for one in tags:
        if one.lower() not in {tag.lower() for tag in known}:
            raise unknown_name("tag", one, known)
    found = search_catalog(catalog, words, tags)
    rows = listed_environments(found[:limit])
    ranks = {row.id: rank for rank, row in enumerate(found)}
    rows = sorted((row for row in rows if row.id in ranks), key=lambda row: ranks[row.id])
    if as_json:
        typer.echo(msgspec.json.encode(rows).decode())
    elif rows:
        typer.echo(table(rows))
        if len(found) > limit:
            typer.echo(f"{len(found) - limit} more; add words, or raise --limit")
    else:
        typer.echo(_nothing(words, catalog, opened.address))


def _nothing(words: str, catalog: Sequence[CatalogRow], address: str) -> str:
    names = {row.id.partition("/")[2]: row.id for row in catalog}
    close = [names[name] for name in nearest(words, names)]
    advice = f"; the nearest names are {', '.join(close)}" if close else ""
    return f"Nothing in {address} matches {words!r}{advice}. To see all: telescope env list"
