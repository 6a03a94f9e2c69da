"""Registry tokens, from environment variables or else from the keyring, each for one registry.

`TELESCOPE_HUB_TOKEN` is for the default registry that the user chose (`TELESCOPE_REGISTRY` or the
configuration file). It is never sent to an address from elsewhere, such as a lock file, because
whoever writes that file would get the token. `TELESCOPE_HUB_TOKEN_<NAME>` is for a named registry.
"""

import os
from collections.abc import Mapping

from telescope_core.errors import ConfigError
from telescope_envs import keyrings
from telescope_envs.addresses import Address, parse_address
from telescope_envs.user_config import read_user_config

VARIABLE = "TELESCOPE_HUB_TOKEN"


class Token(str):
    """A secret whose repr hides it, so that debug output does not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return asterisks instead of the secret."""
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
    found = keyrings.stored(place.without_revision)
    return checked_token(found, "the keyring") if found else None


def store_token(address: str, token: Token, *, environ: Mapping[str, str] = os.environ) -> None:
    """Store `token` for the registry at `address`; raises ConfigError without a keyring."""
    place = _place_with_tokens(address)
    names = read_user_config(environ).names_of(place)
    variable = variable_of(names[0]) if names else VARIABLE
    keyrings.store(
        place.without_revision, token, instead=f"put it in the environment variable {variable}"
    )


def forget_token(address: str) -> bool:
    """Remove the token for the registry at `address` from the keyring; False if none was there."""
    return keyrings.remove(_place_with_tokens(address).without_revision)


def _place_with_tokens(address: str) -> Address:
    place = parse_address(address)
    if place.scheme == "file":
        raise ConfigError(f"{address} is a folder, which needs no token; name a registry that does")
    return place


def token_variables(place: Address, *, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that may hold the token for `place`, the most exact one first."""
    config = read_user_config(environ)
    variables = [variable_of(name) for name in config.names_of(place)]
    if config.is_default(place, environ):
        variables.append(VARIABLE)
    return variables


def login_hint(address: str, *, environ: Mapping[str, str] = os.environ) -> str:
    """Return how to give Telescope a token for the registry at `address`."""
    variables = token_variables(parse_address(address), environ=environ)
    if variables:
        return f"set {variables[0]}, or run: telescope hub login --registry {address}"
    return (
        f"run: telescope hub login --registry {address}, or set TELESCOPE_REGISTRY to that "
        f"address and {VARIABLE} to the token"
    )


def variable_of(name: str) -> str:
    """Return the variable that holds the token for the registry called `name`."""
    return f"{VARIABLE}_{name.upper().replace('-', '_')}"


def checked_token(text: str, source: str) -> Token:
    """Return the token in `text`; raises ConfigError, which hides `text`, if it is not a token."""
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{source} does not hold a token, which is printable ASCII without spaces; "
            "copy the token again"
        )
    return Token(token)
