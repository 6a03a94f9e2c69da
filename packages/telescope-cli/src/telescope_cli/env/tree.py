"""`telescope env tree`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer

from telescope_cli.env.options import InstalledNamesArgument, JsonOption
from telescope_core.finding.locate import locate_environment
from telescope_envs.install.packages import DependencyNode, dependency_tree, packages_of
from telescope_envs.locator import requirements_of, usable_ids


def tree(
    names: InstalledNamesArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Show what installed environments depend on, read from the installed packages.

    A package marked (*) is expanded elsewhere in the tree.

    Example: telescope env tree math-reasoning
    """
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    for name in names or usable_ids():
        location = locate_environment(name)
        nodes = dependency_tree(requirements_of(location), packages_of(location.interpreter))
        about = {"id": location.id, "version": location.version, "place": location.place.value}
        rows.append({**about, "needs": [asdict(node) for node in nodes]})
        head = f"{location.id} {location.version} ({location.place})"
        texts.append("\n".join((head, *_lines(nodes, ""))))
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        typer.echo("\n\n".join(texts) or "No environment is installed; see: telescope env list")


def _lines(nodes: Sequence[DependencyNode], indent: str) -> Iterator[str]:
    for index, node in enumerate(nodes):
        is_last = index == len(nodes) - 1
        wanted = f" ({node.wanted})" if node.wanted else ""
        mark = " (*)" if node.is_repeated else ""
        name = f"{node.name} {node.version or 'MISSING'}"
        yield f"{indent}{'`-- ' if is_last else '|-- '}{name}{wanted}{mark}"
        yield from _lines(node.needs, f"{indent}{'    ' if is_last else '|   '}")
