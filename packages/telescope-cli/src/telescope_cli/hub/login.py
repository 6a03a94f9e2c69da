"""`telescope hub login` and `logout`."""

import json
import sys
from contextlib import suppress
from getpass import getpass

import typer

from telescope_cli.env.options import JsonOption, RegistryOption
from telescope_core.base.errors import ConfigError
from telescope_envs.registry.config import Opening, find_address
from telescope_envs.registry.credentials import checked_token, forget_token, store_token


def login(registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """Store a token for a registry in the system keyring.

    The token is typed at a prompt that hides it, or read from standard input, because an argument
    would stay in the shell history. It is sent only to that registry's host.

    Example: telescope hub login --registry corp
    """
    place = find_address(registry, Opening())
    store_token(place.text, checked_token(_asked(place.text), "what was given"))
    _say(place.without_revision, "stored", as_json=as_json)


def logout(registry: RegistryOption = None, as_json: JsonOption = False) -> None:
    """Remove a registry's token from the system keyring.

    Example: telescope hub logout --registry corp
    """
    place = find_address(registry, Opening())
    outcome = "removed" if forget_token(place.text) else "was not there"
    _say(place.without_revision, outcome, as_json=as_json)


def _asked(address: str) -> str:
    text = ""
    with suppress(EOFError):
        text = getpass(f"Token for {address}: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not text:
        raise ConfigError(
            "got no token; type it when telescope hub login asks, or pass it on standard input: "
            "telescope hub login < token-file"
        )
    return text


def _say(address: str, outcome: str, *, as_json: bool) -> None:
    row = {"registry": address, "token": outcome}
    typer.echo(json.dumps(row) if as_json else f"{address}: token {outcome}")
