"""`telescope hub namespace`: add and list."""

import json
from contextlib import closing
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_cli.verbs import Verb, VerbGroup, verb_app
from telescope_core.errors import ConfigError
from telescope_envs.server.hub import HubStore

VERBS = {
    "add": Verb(target="telescope_cli.hub.namespaces:add", help="Add an owner."),
    "list": Verb(target="telescope_cli.hub.namespaces:list_namespaces", help="List the owners."),
}
_KINDS = ("repository", "user", "key")


class _Namespace(VerbGroup):
    verbs = VERBS
    epilog_text = """Examples:

  telescope hub namespace add acme --data hub-data"""


app = verb_app(_Namespace)


@app.callback()
def namespace() -> None:
    """Add and list the owners of a served registry."""


def add(
    owner: Annotated[str, typer.Argument(help="The owner: the part before the / in owner/name.")],
    data: DataOption,
    publisher: Annotated[
        list[str] | None,
        typer.Option(help="Who the owner belongs to, as KIND:ID; KIND is repository, user or key."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add an owner, so that you can create tokens that may publish under it.

    Example: telescope hub namespace add acme --data hub-data
    """
    publishers = [_publisher(text) for text in publisher or []]
    with closing(HubStore(data)) as hub:
        hub.add_namespace(owner, publishers)
    if as_json:
        typer.echo(json.dumps({"owner": owner, "publishers": publishers}))
        return
    typer.echo(f"{owner}: added; next: telescope hub token create LABEL --namespace {owner}")


def list_namespaces(data: DataOption, as_json: JsonOption = False) -> None:
    """List the owners.

    Example: telescope hub namespace list --data hub-data
    """
    with closing(HubStore(data, must_exist=True)) as hub:
        rows = hub.namespaces()
    if as_json:
        typer.echo(json.dumps([{"owner": owner, "status": status} for owner, status in rows]))
        return
    for owner, status in rows:
        typer.echo(owner if status == "active" else f"{owner}  {status}")


def _publisher(text: str) -> dict[str, str]:
    kind, _, name = text.partition(":")
    if kind not in _KINDS or not name:
        raise ConfigError(
            f"publisher {text!r} must be written KIND:ID, where KIND is one of {', '.join(_KINDS)}"
        )
    return {"kind": kind, "id": name}
