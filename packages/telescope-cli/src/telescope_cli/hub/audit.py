"""`telescope hub audit`."""

import json
from contextlib import closing

import typer

from telescope_cli.env.options import JsonOption
from telescope_cli.hub.options import DataOption
from telescope_envs.server.hub import HubStore


def audit(data: DataOption, as_json: JsonOption = False) -> None:
    """List who changed what in a served registry, the oldest change first.

    A change without a token was made on the server's machine.

    Example: telescope hub audit --data hub-data
    """
    with closing(HubStore(data, must_exist=True)) as hub:
        entries = hub.audit()
    if as_json:
        typer.echo(json.dumps([entry._asdict() for entry in entries]))
        return
    for entry in entries:
        token = f"  by token {entry.token}" if entry.token else ""
        reason = f"  ({entry.reason})" if entry.reason else ""
        typer.echo(f"{entry.at}  {entry.event}  {entry.subject}{token}{reason}")
