"""Secrets in the keyring of the operating system, through the optional `keyring` library."""

from importlib.util import find_spec

from telescope_core.errors import ConfigError

SERVICE = "telescope-hub"


def stored(place: str) -> str:
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


def store(place: str, secret: str, *, instead: str) -> None:
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
        reason = "" if stored(place) == secret else "does not return what is stored in it"
    except NoKeyringError:
        reason = "is not a usable keyring: this system has none"
    except KeyringError as error:
        reason = f"refused with {type(error).__name__}"
    if reason:
        name = type(keyring.get_keyring()).__module__
        raise ConfigError(
            f"{name} {reason}, so nothing was stored; unlock or set one up, or {instead}"
        )


def remove(place: str) -> bool:
    """Remove the secret stored for `place`; False if there was none."""
    if not stored(place):
        return False
    import keyring

    keyring.delete_password(SERVICE, place)
    return True
