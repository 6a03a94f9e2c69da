"""`telescope hub login` and `logout`."""

import json
import sys
from getpass import getpass

import typer

from telescope_cli.env.options import JsonOption, RegistryOption
from telescope_core.errors import ConfigError
from telescope_envs.credentials import checked_token, forget_token, store_token
from telescope_envs.registry.choice import Opening, find_address


def login(registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """Keep a token for a registry in the keyring of this system.

    The token is asked for without showing it, or read from standard input: as an argument it
    would stay in the history of the shell. It is sent to that registry's host alone.

    Example: telescope hub login --registry corp
    """
    place = find_address(registry, Opening())
    store_token(place.text, checked_token(_asked(place.text), "what was given"))
    _say(place.without_revision, "stored", as_json=as_json)


def logout(registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """Remove a registry's token from the keyring of this system.

    Example: telescope hub logout --registry corp
    """
    place = find_address(registry, Opening())
    outcome = "removed" if forget_token(place.text) else "was not there"
    _say(place.without_revision, outcome, as_json=as_json)


def _asked(address: str) -> str:
    if sys.stdin.isatty():
        return getpass(f"Token for {address}: ")
    text = sys.stdin.readline()
    if not text:
        raise ConfigError(
            "no token came; type it where telescope hub login asks, or pipe it in: "
            "telescope hub login < token-file"
        )
    return text


def _say(address: str, outcome: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"registry": address, "token": outcome}))
    else:
        typer.echo(f"{address}: token {outcome}")
