"""Registry tokens, from environment variables or else from the keyring, each for one registry.

`TELESCOPE_HUB_TOKEN` is for the default registry that the user chose (`TELESCOPE_REGISTRY` or the
configuration file). It is never sent to an address from elsewhere, such as a lock file, because
whoever writes that file would get the token. `TELESCOPE_HUB_TOKEN_<NAME>` is for a named registry.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec

from telescope_core.base.errors import ConfigError
from telescope_envs.registry.config import Address, origin_of, parse_address, read_user_config

SERVICE = "telescope-hub"


def _stored(place: str) -> str:
    """Return the secret stored for `place`; empty if there is none, or no keyring."""
    if find_spec("keyring") is None:
        return ""
    import keyring
    from keyring.errors import KeyringError

    try:
        return keyring.get_password(SERVICE, place) or ""
    except KeyringError:
        # The keyring is locked or missing. Many registries need no token, and the error of one that
        # does need it says what to do.
        return ""


def _store(place: str, secret: str, *, instead: str) -> None:
    """Store `secret` for `place`; raises ConfigError, which suggests `instead`, if it cannot."""
    if find_spec("keyring") is None:
        raise ConfigError(
            "the keyring library is not installed, so nothing was stored; run: "
            f"pip install 'telescope-envs[keyring]', or {instead}"
        )
    import keyring
    from keyring.errors import KeyringError, NoKeyringError

    try:
        keyring.set_password(SERVICE, place, secret)
        reason = "" if _stored(place) == secret else "does not return what is stored in it"
    except NoKeyringError:
        reason = "is not a usable keyring: this system has none"
    except KeyringError as error:
        reason = f"refused with {type(error).__name__}"
    if reason:
        name = type(keyring.get_keyring()).__module__
        raise ConfigError(
            f"{name} {reason}, so nothing was stored; unlock or set one up, or {instead}"
        )


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
    found = _stored(place.without_revision)
    return checked_token(found, "the keyring") if found else None


def store_token(address: str, token: Token, *, environ: Mapping[str, str] = os.environ) -> None:
    """Store `token` for the registry at `address`; raises ConfigError without a keyring."""
    place = _place_with_tokens(address)
    names = read_user_config(environ).names_of(place)
    variable = variable_of(names[0]) if names else VARIABLE
    _store(place.without_revision, token, instead=f"put it in the environment variable {variable}")


def forget_token(address: str) -> bool:
    """Remove the token for the registry at `address` from the keyring; False if none was there."""
    place = _place_with_tokens(address).without_revision
    if not _stored(place):
        return False
    import keyring

    keyring.delete_password(SERVICE, place)
    return True


def _place_with_tokens(address: str) -> Address:
    place = parse_address(address)
    if place.scheme == "file":
        raise ConfigError(f"{address} is a folder, which needs no token; name a registry that does")
    return place


def token_variables(place: Address, *, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables that may hold the token for `place`, the most exact one first."""
    config = read_user_config(environ)
    origin = origin_of(place.text)
    variables = [
        variable_of(name)
        for name in config.names_of(place)
        if origin_of(config.registries[name].place.text) == origin
    ]
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
