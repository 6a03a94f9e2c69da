"""`telescope hub alias`: add."""

import json
from contextlib import closing
from typing import Annotated

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_cli.verbs import Verb, VerbGroup, verb_app
from telescope_envs.server.hub import HubStore

VERBS = {
    "add": Verb(target="telescope_cli.hub.aliases:add", help="Give an environment a short name."),
}


class _Alias(VerbGroup):
    verbs = VERBS
    epilog_text = """Examples:

  telescope hub alias add toy acme/toy --data hub-data"""


app = verb_app(_Alias)


@app.callback()
def alias() -> None:
    """Give environments of a served registry a short name."""


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
