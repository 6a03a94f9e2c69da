"""Which environment variables an environment may declare as its secrets, and telling people.

And what is left out of texts because it may be a secret.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from telescope_core.errors import EnvironmentLoadError

RESERVED_PREFIX = "TELESCOPE_"
"""Variables of Telescope itself: tokens of registries and workers, and where its data is."""
HIDDEN = "(left out)"
"""What stands in a text where a secret was."""
_SECRET = re.compile(r"(?:key|token|secret|password|passwd|credentials?)s?$", re.IGNORECASE)
"""How the names of secrets end."""
_SHORTEST_HIDDEN = 6
"""Characters of the shortest value that is left out: shorter ones are words such as `none`, which
no text could do without."""


def reserved_secrets(names: Iterable[str]) -> list[str]:
    """Return those of `names` that no environment may read."""
    return sorted(name for name in names if name.upper().startswith(RESERVED_PREFIX))


def require_names(declared: object, who: str) -> None:
    """Raise EnvironmentLoadError unless what `who` declares as its secrets is a tuple of names."""
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
    """Return which variables `who` may read, and whether they are set; never their values.

    Empty if it declares none.
    """
    found = which_are_set(names, environ)
    return f"{who} may read these environment variables: {secrets_text(found)}" if found else ""


def which_are_set(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, bool]:
    """Return for each of `names` whether it has a value; an empty value is none."""
    return {name: bool(environ.get(name)) for name in sorted(names)}


def secrets_text(are_set: Mapping[str, bool]) -> str:
    """Return the names with the word that says whether each is set."""
    return ", ".join(
        f"{shown_name(name)} ({'set' if is_set else 'not set'})" for name, is_set in are_set.items()
    )


def shown_name(name: str) -> str:
    """Return a name that a worker may have made up, as text that no terminal acts on."""
    return name if name.isascii() and name.isidentifier() else ascii(name)


def secret_values(settings: Mapping[str, object]) -> set[str]:
    """Return the texts of `settings` whose names look like those of secrets, in all sections."""
    found: set[str] = set()
    for name, value in settings.items():
        several = isinstance(value, list | tuple)
        for one in cast(Sequence[object], value) if several else (value,):
            if isinstance(one, Mapping):
                found |= secret_values(cast(Mapping[str, object], one))
            elif isinstance(one, str) and _SECRET.search(name):
                found.add(one)
    return found


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return `text` without the values of secrets, as far as these are not very short."""
    # A longer one may hold a shorter one.
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_HIDDEN:
            text = text.replace(value, HIDDEN)
    return text
