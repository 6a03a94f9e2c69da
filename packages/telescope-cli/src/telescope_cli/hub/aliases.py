"""`telescope hub alias`: add."""

import json
from contextlib import closing
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_cli.verbs import Verb, verb_app
from telescope_envs.server.hub import HubStore

VERBS = {
    "add": Verb(".hub.aliases:add", "Give an environment a short name."),
}


app = verb_app(
    VERBS,
    "Give environments of a served registry a short name.",
    epilog="""Examples:

  telescope hub alias add toy acme/toy --data hub-data""",
)


def add(
    name: Annotated[str, typer.Argument(help="The short name.")],
    environment: Annotated[str, typer.Argument(help="The environment, owner/name.")],
    data: DataOption,
    as_json: JsonOption = False,
) -> None:
    """Give an environment a short name, permanently: it can never be given to another one.

    Example: telescope hub alias add toy acme/toy --data hub-data
    """
    with closing(HubStore(data, must_exist=True)) as hub:
        hub.add_alias(name, environment)
    typer.echo(json.dumps({name: environment}) if as_json else f"{name}: {environment}")
