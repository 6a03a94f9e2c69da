"""`telescope env yank` and `deprecate`: change the status of what is already published."""

import json
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption, RegistryOption
from telescope_core.base.errors import ConfigError
from telescope_envs.publish.status import StatusChange, undeprecate, unyank
from telescope_envs.publish.status import deprecate as deprecate_environment
from telescope_envs.publish.status import yank as yank_release
from telescope_envs.registry.lookup import open_writable, registry_of

ReasonOption = Annotated[str, typer.Option("--reason", help="Why, in one line shown to users.")]


def yank(
    release: Annotated[str, typer.Argument(metavar="ID@VERSION")],
    reason: ReasonOption = "",
    undo: Annotated[bool, typer.Option("--undo", help="Undo the yank.")] = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Withdraw one version, so that it is chosen only if it is named exactly or locked.

    Example: telescope env yank acme/sort-words@0.2.0 --reason "pays for the empty answer"
    """
    _require_reason(reason, undo=undo)
    store = open_writable(registry_of(release, registry))
    try:
        change = unyank(store, release) if undo else yank_release(store, release, reason=reason)
    finally:
        store.close()
    said = f"{release}: {'no longer yanked' if undo else f'yanked: {reason}'}"
    _tell(change, said, as_json=as_json)


def deprecate(
    environment: Annotated[str, typer.Argument(metavar="ID")],
    reason: ReasonOption = "",
    replacement: Annotated[
        str, typer.Option("--replacement", metavar="ID", help="What to use instead.")
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Undo the deprecation.")] = False,
    registry: RegistryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mark an environment as one that should no longer be used.

    Example: telescope env deprecate acme/old --reason "wrong answers" --replacement acme/new
    """
    _require_reason(reason, undo=undo)
    if undo and replacement:
        raise ConfigError("--undo takes no --replacement; omit one of them")
    store = open_writable(registry_of(environment, registry))
    try:
        change = (
            undeprecate(store, environment)
            if undo
            else deprecate_environment(store, environment, reason=reason, replacement=replacement)
        )
    finally:
        store.close()
    said = f"{change.id}: {'no longer deprecated' if undo else f'deprecated: {reason}'}"
    _tell(change, said, as_json=as_json)


def _require_reason(reason: str, *, undo: bool) -> None:
    if undo == bool(reason):
        wanted = "--undo takes no --reason" if undo else 'give --reason "why, in one line"'
        raise ConfigError(f"{wanted}; users see the reason when they install")


def _tell(change: StatusChange, said: str, *, as_json: bool) -> None:
    if as_json:
        status = change.status.as_table()
        typer.echo(json.dumps({"id": change.id, "status": status, "effect": change.effect}))
        return
    typer.echo(f"{said}\n{change.effect}")
