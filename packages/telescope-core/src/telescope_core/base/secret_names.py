"""Check which variables an environment declares as secrets, and remove secrets from text.

Everything that writes settings or addresses where others may read them takes `without_secrets`, and
what quotes texts of others takes `hidden` or `without_values` with the values that are known.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import unquote

from telescope_core.base.errors import EnvironmentLoadError

RESERVED_PREFIX = "TELESCOPE_"
"""Prefix of Telescope's own variables: tokens of registries and workers, and its data folder."""
HIDDEN = "(left out)"
"""Replaces a secret in a text."""
_SECRET = re.compile(
    r"(?:key|token|secret|password|passwd|passphrase|credential|authorization|auth|cookie)s?_?\d*$",
    re.IGNORECASE,
)
"""Endings of names that mark a setting as a secret."""
_SIGNATURE = re.compile(r"(?:^|[-_])sig(?:nature)?$", re.IGNORECASE)
"""Names of query parameters that sign an address, which makes it as good as a key."""
_USER = re.compile(r"(?<=://)[^\s/?#]+@")
"""User and password in an address, in a text that may hold several addresses."""
_QUERY = re.compile(r"(?<=[?&;#])([^\s=?&;#]+)=(?!\(left out\))([^\s&;#\"'<>)]+)")
"""Name and value of a query parameter in an address."""
_KEY = re.compile(r"\b[A-Z][A-Z0-9_]*_(?:KEY|TOKEN|SECRET|PASSWORD|URL)\b")
"""Name of a variable that an environment may lack, in a message."""
_SHORTEST_HIDDEN = 6
"""Characters of the shortest value that is left out: shorter ones are words such as `none`, which
no text could do without."""


def reserved_secrets(names: Iterable[str]) -> list[str]:
    """Return those of `names` that no environment may read."""
    return sorted(name for name in names if name.upper().startswith(RESERVED_PREFIX))


def link_advice(text: str, seen: Collection[str]) -> str:
    """Return what to do if `text` names a variable that a linked environment does not see.

    `seen` are the variables that it sees. Empty if there is none, or if `text` says so already.
    """
    key = next((key for key in _KEY.findall(text) if key not in seen), "")
    if not key or "--secret" in text:
        return ""
    return (
        "; the environment sees only the variables that its link names: "
        f"telescope env link --secret {key}"
    )


def require_names(declared: object, who: str) -> None:
    """Raise EnvironmentLoadError unless the secrets that `who` declares are a tuple of names."""
    if isinstance(declared, tuple | list):
        wrong = [name for name in cast(Sequence[object], declared) if not isinstance(name, str)]
        if not wrong:
            return
    raise EnvironmentLoadError(
        f"{who}: secrets must be a tuple of names of environment variables, got {declared!r}; "
        'write: secrets = ("JUDGE_KEY",)'
    )


def require_own_secrets(names: Iterable[str], who: str) -> None:
    """Raise EnvironmentLoadError if `who` declares a variable of Telescope itself as a secret."""
    reserved = reserved_secrets(names)
    if reserved:
        raise EnvironmentLoadError(
            f"{who} declares the secrets {', '.join(reserved)}; names that begin with "
            f"{RESERVED_PREFIX} are Telescope's own, such as its tokens, and no environment gets "
            "them. Its author must use another name"
        )


def secrets_line(who: str, names: Iterable[str], environ: Mapping[str, str]) -> str:
    """Return a line with the variables that `who` may read and whether each is set, without values.

    Empty if it declares none.
    """
    found = which_are_set(names, environ)
    return f"{who} may read these environment variables: {secrets_text(found)}" if found else ""


def which_are_set(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, bool]:
    """Return for each name whether it has a value; an empty value counts as none."""
    return {name: bool(environ.get(name)) for name in sorted(names)}


def secrets_text(are_set: Mapping[str, bool]) -> str:
    """Return the names with the word that says whether each is set."""
    return ", ".join(
        f"{shown_name(name)} ({'set' if is_set else 'not set'})" for name, is_set in are_set.items()
    )


def shown_name(name: str) -> str:
    """Return a name that a worker may have made up, as text that is safe to print on a terminal."""
    return name if name.isascii() and name.isidentifier() else ascii(name)


def secret_values(settings: Mapping[str, object]) -> set[str]:
    """Return the texts of `settings` that look like secrets, in all sections.

    These are the values of names that end like those of secrets. For addresses, they include user
    with password, the password alone, and values of such names in the query.
    """
    found: set[str] = set()
    for name, value in settings.items():
        _collect(value, is_secret=_SECRET.search(name) is not None, found=found)
    return found


def _collect(value: object, *, is_secret: bool, found: set[str]) -> None:
    if isinstance(value, Mapping):
        for name, one in cast(Mapping[str, object], value).items():
            _collect(one, is_secret=is_secret or bool(_SECRET.search(str(name))), found=found)
    elif isinstance(value, list | tuple):
        for one in cast(Sequence[object], value):
            _collect(one, is_secret=is_secret, found=found)
    elif isinstance(value, str):
        if is_secret:
            found.add(value)
        for user in _USER.findall(value):
            password = user[:-1].partition(":")[2]
            found |= {user[:-1], password, unquote(password)} - {""}
        found |= {
            form
            for name, one in _QUERY.findall(value)
            if _is_secret_in_query(name)
            for form in (one, unquote(one))
        }


def _is_secret_in_query(name: str) -> bool:
    return _SECRET.search(name) is not None or _SIGNATURE.search(name) is not None


def without_passwords(text: str) -> str:
    """Return `text` with users, passwords and secret query values removed from its addresses."""
    if "://" not in text:
        return text
    return _QUERY.sub(
        lambda one: f"{one[1]}={HIDDEN}" if _is_secret_in_query(one[1]) else one[0],
        _USER.sub("", text),
    )


def without_secrets(settings: Any, *, keeps_names: bool = True) -> Any:
    """Return `settings`, which may be nested, in a form that may be written where others read it.

    Texts whose names end like those of secrets become `HIDDEN`, and addresses lose their passwords.
    Without `keeps_names` such names are left out as well, because a masked value cannot be
    compared.
    """
    if isinstance(settings, Mapping):
        shown: dict[str, Any] = {}
        for name, value in cast(Mapping[str, Any], settings).items():
            if not _SECRET.search(str(name)):
                shown[name] = without_secrets(value, keeps_names=keeps_names)
                continue
            masked = _masked(value)
            if keeps_names or (value and HIDDEN not in str(masked)):
                shown[name] = masked
        return shown
    if isinstance(settings, list | tuple):
        values = cast(Sequence[Any], settings)
        return [without_secrets(one, keeps_names=keeps_names) for one in values]
    return without_passwords(settings) if isinstance(settings, str) else settings


def _masked(value: Any) -> Any:
    """Return `value` with each text replaced by `HIDDEN`; numbers, such as token counts, stay."""
    if isinstance(value, Mapping):
        return {name: _masked(one) for name, one in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_masked(one) for one in cast(Sequence[Any], value)]
    return HIDDEN if isinstance(value, str) and value else value


def names_left_out(settings: Any, name: str = "") -> Iterator[str]:
    """Yield the names of settings of which `without_secrets` has left out a part."""
    if isinstance(settings, Mapping):
        for key, one in cast(Mapping[str, Any], settings).items():
            yield from names_left_out(one, f"{name}.{key}" if name else str(key))
    elif isinstance(settings, list | tuple):
        for number, one in enumerate(cast(Sequence[Any], settings)):
            yield from names_left_out(one, f"{name}[{number}]")
    elif isinstance(settings, str) and HIDDEN in settings:
        yield name


def without_values(value: Any, secrets: Collection[str]) -> Any:
    """Return a JSON value with all `secrets` removed from its texts; see `hidden`."""
    if not secrets:
        return value
    if isinstance(value, Mapping):
        return {
            # Not all names are texts before they are JSON.
            without_values(name, secrets): without_values(one, secrets)
            for name, one in cast(Mapping[Any, Any], value).items()
        }
    if isinstance(value, list | tuple):
        return [without_values(one, secrets) for one in cast(Sequence[Any], value)]
    return hidden(value, secrets) if isinstance(value, str) else value


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with the values of secrets removed, except very short ones."""
    # A longer one may hold a shorter one.
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_HIDDEN:
            text = text.replace(value, HIDDEN)
    return text
