"""`telescope env tree` and `verify`: what installed environments need, and whether it is whole."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Annotated, Any

import typer

from telescope_cli.env.options import JsonOption, complete_installed, progress
from telescope_core.base.number_text import counted
from telescope_core.finding.locate import locate_environment
from telescope_envs.install.packages import DependencyNode, dependency_tree, packages_of
from telescope_envs.install.verify_installed import Verification, compared, verify
from telescope_envs.locator import requirements_of, usable_ids

_MOST_SHOWN = 20

InstalledNamesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME...]",
        help="Installed environments; all of them by default.",
        autocompletion=complete_installed,
    ),
]


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


def verify_environments(
    names: InstalledNamesArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Check installed environments: files, packages, lock and registry.

    Every file of an environment and its dependencies is compared with its recorded hash, the
    packages are compared with the lock, and the wheel is compared with the registry. Files that do
    not belong to any package are listed. The exit code is 1 when something is wrong.

    Example: telescope env verify math-reasoning
    """
    done: list[Verification] = []
    installed, compare = cache(packages_of), cache(compared)
    for name in names or usable_ids():
        progress(f"checking {name}")
        done.append(verify(name, packages_of=installed, compare=compare))
    if as_json:
        rows = [{**asdict(one), "is_whole": one.is_whole} for one in done]
        typer.echo(json.dumps(rows))
    else:
        typer.echo("\n".join(map(_text, done)) or "No environment is installed.")
    if not all(one.is_whole for one in done):
        raise typer.Exit(1)


def _text(one: Verification) -> str:
    problems = [finding for finding in one.findings if finding.is_problem]
    notes = [finding for finding in one.findings if not finding.is_problem]
    verdict = "whole" if one.is_whole else counted(len(problems), "problem")
    label = " ".join(part for part in (one.id, one.version) if part)
    lines = [f"{label}: {verdict}, {counted(one.num_files, 'file')} compared"]
    lines += [f"  {finding.kind}: {finding.what} {finding.text}" for finding in problems]
    if len(lines) > _MOST_SHOWN + 1:
        lines[_MOST_SHOWN + 1 :] = [f"  and {len(problems) - _MOST_SHOWN} more: see --json"]
    return "\n".join([*lines, *(f"  {note.kind}: {note.what} {note.text}" for note in notes)])
