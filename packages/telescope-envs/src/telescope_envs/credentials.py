"""Tokens for registries: from the environment, else from the keyring, each for one registry.

`TELESCOPE_HUB_TOKEN` is for the default registry that the user chose (`TELESCOPE_REGISTRY` or the
configuration file), never for an address that stands somewhere else, such as in a lock file:
whoever writes that file would get the token. `TELESCOPE_HUB_TOKEN_<NAME>` is for a named one.
"""

import os
from collections.abc import Mapping

from telescope_core.errors import ConfigError
from telescope_envs.registry.address import Address, parse_address
from telescope_envs.user_config import read_user_config

VARIABLE = "TELESCOPE_HUB_TOKEN"


class Token(str):
    """A secret that does not show itself where an object is printed for debugging."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return stars."""
        return "Token('***')"


def token_for(address: str, *, environ: Mapping[str, str] = os.environ) -> Token | None:
    """Return the token for the registry at `address`; None when there is none.

    It may be sent to the host and port of that address only.
    """
    place = parse_address(address)
    if place.scheme == "file":
        return None
    for variable in token_variables(place, environ=environ):
        if environ.get(variable):
            return checked_token(environ[variable], variable)
    return None


def token_variables(place: Address, *, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that may hold the token for `place`, the most exact one first."""
    config = read_user_config(environ)
    variables = [variable_of(name) for name in config.names_of(place)]
    default = config.default(environ)
    if default is not None and default.without_revision == place.without_revision:
        variables.append(VARIABLE)
    return variables


def variable_of(name: str) -> str:
    """Return the variable that holds the token for the registry called `name`."""
    return f"{VARIABLE}_{name.upper().replace('-', '_')}"


def checked_token(text: str, source: str) -> Token:
    """Return the token in `text`; raises ConfigError, which does not show it, for what is none."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} does not hold a token: one is printable ASCII without spaces; copy it again"
        )
    return Token(token)
