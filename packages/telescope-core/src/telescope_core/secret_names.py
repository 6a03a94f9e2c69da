"""Which environment variables an environment may declare as its secrets."""

from collections.abc import Container, Iterable

from telescope_core.errors import EnvironmentLoadError

RESERVED_PREFIX = "TELESCOPE_"
"""Variables of Telescope itself: tokens of registries and workers, and where its data is."""


def reserved_secrets(names: Iterable[str]) -> list[str]:
    """Return those of `names` that no environment may read."""
    return sorted(name for name in names if name.upper().startswith(RESERVED_PREFIX))


def require_own_secrets(names: Iterable[str], who: str) -> None:
    """Raise EnvironmentLoadError if `who` declares a variable of Telescope itself as a secret."""
    reserved = reserved_secrets(names)
    if reserved:
        raise EnvironmentLoadError(
            f"{who} declares the secrets {', '.join(reserved)}; names that begin with "
            f"{RESERVED_PREFIX} are Telescope's own, such as its tokens, and no environment gets "
            "them. Its author must use another name"
        )


def secrets_line(environment: str, names: Iterable[str], environ: Container[str]) -> str:
    """Return which variables `environment` may read, and whether they are set; never their values.

    Empty if it declares none.
    """
    listed = ", ".join(f"{one} ({'set' if one in environ else 'not set'})" for one in sorted(names))
    return f"{environment} may read these environment variables: {listed}" if listed else ""
