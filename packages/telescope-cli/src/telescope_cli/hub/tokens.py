"""`telescope hub token`: create, list and revoke."""

import json
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.serve import DataOption
from telescope_cli.verbs import Verb, verb_app
from telescope_envs.server.auth import CallerToken, Scope, all_tokens, create_token, revoke_token
from telescope_envs.server.hub import opened_hub

app = verb_app(
    {
        "create": Verb(".hub.tokens:create", "Create a token; it is shown only once."),
        "list": Verb(".hub.tokens:list_tokens", "List tokens, without their secrets."),
        "revoke": Verb(".hub.tokens:revoke", "Revoke a token immediately."),
    },
    "Create, list and revoke the tokens of a served registry.",
    epilog="""Examples:

  telescope hub token create ci-of-acme --namespace acme --data hub-data

  telescope hub token revoke 1f0c2a9b --data hub-data""",
)


def create(
    label: Annotated[str, typer.Argument(help="Who or what will use it.")],
    data: DataOption,
    scope: Annotated[
        Scope,
        typer.Option(
            help="read: a private registry; publish: under --namespace; admin: everything."
        ),
    ] = Scope.PUBLISH,
    namespace: Annotated[
        list[str] | None, typer.Option(help="Owner it may publish under; repeatable.")
    ] = None,
    days: Annotated[float, typer.Option(help="Days until it expires.", max=3650)] = 90,
    as_json: JsonOption = False,
) -> None:
    """Create a token and print it; this is the only time it is shown.

    Example: telescope hub token create ci-of-acme --namespace acme --data hub-data
    """
    with opened_hub(data) as hub:
        new = create_token(
            hub.database,
            label,
            scope=scope,
            owners=tuple(namespace or ()),
            lives=timedelta(days=days),
        )
    if as_json:
        typer.echo(json.dumps({**_row(new.token), "token": new.secret}))
        return
    sys.stderr.write(
        f"token {new.token.id}, {_scope(new.token)}, until {new.token.expires_at:%Y-%m-%d}; "
        "this is the only time it is shown:\n"
    )
    typer.echo(new.secret)


def list_tokens(data: DataOption, as_json: JsonOption = False) -> None:
    """List the tokens, without their secrets.

    Example: telescope hub token list --data hub-data
    """
    with opened_hub(data, is_read_only=True) as hub:
        rows = all_tokens(hub.database)
    if as_json:
        typer.echo(json.dumps([_row(row) for row in rows]))
        return
    if not rows:
        typer.echo("There are no tokens; to create one, see: telescope hub token create --help")
    for row in rows:
        state = row.why_not or f"until {row.expires_at:%Y-%m-%d}"
        typer.echo(f"{row.id}  {state:<17}  {_scope(row):<24}  {row.label}")


def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="The id shown by telescope hub token list.")
    ],
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Revoke a token immediately.

    Example: telescope hub token revoke 1f0c2a9b --data hub-data
    """
    with opened_hub(data) as hub:
        revoked = revoke_token(hub.database, token_id)
    typer.echo(json.dumps(_row(revoked)) if as_json else f"{revoked.id} {revoked.label}: revoked")


def _scope(token: CallerToken) -> str:
    owners = ", ".join(token.owners)
    return f"{token.scope.value} as {owners}" if owners else token.scope.value


def _row(token: CallerToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "label": token.label,
        "scope": token.scope.value,
        "namespaces": list(token.owners),
        "created_at": token.created_at.isoformat(),
        "expires_at": token.expires_at.isoformat(),
        "state": token.why_not or "valid",
    }
