"""`telescope hub namespace`: add, list, suspend and restore."""

import json
from contextlib import closing
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_cli.verbs import Verb, verb_app
from telescope_core.base.errors import ConfigError
from telescope_envs.server.hub import HubStore

VERBS = {
    "add": Verb(".hub.namespaces:add", "Add an owner."),
    "list": Verb(".hub.namespaces:list_namespaces", "List the owners."),
    "suspend": Verb(
        ".hub.namespaces:suspend", "Let an owner publish nothing, and refuse its tokens."
    ),
    "restore": Verb(".hub.namespaces:restore", "Take a suspension back."),
}
_KINDS = ("repository", "user", "key")


app = verb_app(
    VERBS,
    "Add, list, suspend and restore the owners of a served registry.",
    epilog="""Examples:

  telescope hub namespace add acme --data hub-data

  telescope hub namespace suspend acme --reason "stolen token" --data hub-data""",
)


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


Reason = Annotated[str, typer.Option(help="One line for the log: telescope hub audit.")]


def suspend(
    owner: Annotated[str, typer.Argument(help="The owner.")],
    reason: Reason,
    data: DataOption,
    withhold: Annotated[
        bool, typer.Option("--withhold", help="Serve nothing of what it published, either.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Let an owner publish nothing, and refuse its tokens, from the next request on.

    Its published releases stay installable, unless they are withheld.

    Example: telescope hub namespace suspend acme --reason "stolen token" --data hub-data
    """
    with closing(HubStore(data, must_exist=True)) as hub:
        hub.suspend(owner, reason=reason, is_withheld=withhold)
    _say(owner, "withheld" if withhold else "suspended", as_json=as_json)


def restore(
    owner: Annotated[str, typer.Argument(help="The owner.")],
    reason: Reason,
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Take the suspension of an owner back: it can publish again, and its tokens are valid.

    Example: telescope hub namespace restore acme --reason "new tokens" --data hub-data
    """
    with closing(HubStore(data, must_exist=True)) as hub:
        hub.restore(owner, reason=reason)
    _say(owner, "active", as_json=as_json)


def _say(owner: str, status: str, *, as_json: bool) -> None:
    row = {"owner": owner, "status": status}
    typer.echo(json.dumps(row) if as_json else f"{owner}: {status}")


def _publisher(text: str) -> dict[str, str]:
    kind, _, name = text.partition(":")
    if kind not in _KINDS or not name:
        raise ConfigError(
            f"publisher {text!r} must be written KIND:ID, where KIND is one of {', '.join(_KINDS)}"
        )
    return {"kind": kind, "id": name}
