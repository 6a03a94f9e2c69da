"""Errors a person can act on. Each says what was expected, what came, and what to do.

The command line prints the message alone and exits with `exit_code`; a traceback is for defects.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class TelescopeError(Exception):
    """Anything Telescope raises on purpose."""

    exit_code = 1


class ConfigError(TelescopeError):
    """A setting, flag or file of the user's that cannot be used as it is."""

    exit_code = 2


class ContextLengthError(ConfigError):
    """A conversation leaves no room for another turn of the model."""


class UnknownNameError(ConfigError):
    """A name that nothing answers to; the message lists the nearest known ones."""


class EnvironmentLoadError(TelescopeError):
    """An environment is missing, or its code could not be loaded."""

    exit_code = 3


class RegistryError(TelescopeError):
    """The registry cannot be read, or a file in it is not what its record says."""

    exit_code = 4


class EndpointError(TelescopeError):
    """A model endpoint did not answer as it must."""

    exit_code = 5


class JudgeError(EndpointError):
    """A judge or a simulated user gave nothing that can be used; the rollout has no reward."""


class ProcessDiedError(TelescopeError):
    """A process this run depends on is gone; the message names it."""

    exit_code = 6


class EnvironmentProcessError(ProcessDiedError):
    """An environment's process died, hung or went out of reach: its rollouts are lost, not bad.

    Whoever plays them tries again; nothing of it ever counts as a reward.
    """


class RewardError(TelescopeError):
    """A reward or metric function broke its contract (not a number, out of range, raised)."""


MAX_LISTED = 40
"""Names an error lists in full; more would bury the message."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names close to `name`, best first, ignoring case and - against _."""
    by_plain = {key.lower().replace("-", "_"): key for key in known}
    matches = get_close_matches(name.lower().replace("-", "_"), by_plain, n=3, cutoff=0.6)
    return [by_plain[match] for match in matches]


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """Build the error for an unknown `name`: the nearest names if any, else what is known."""
    names = sorted(known)
    close = nearest(name, names)
    if close:
        advice = f"did you mean {' or '.join(repr(match) for match in close)}?"
    elif len(names) > MAX_LISTED:
        advice = f"none of the {len(names)} known names is close to it"
    else:
        advice = f"known: {', '.join(names) or 'none'}"
    return UnknownNameError(f"unknown {kind} {name!r}; {advice}{f' {hint}' if hint else ''}")
