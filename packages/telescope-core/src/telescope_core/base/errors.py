"""Errors that a user can act on: each says what was expected, what was found and what to do.

The command line prints only the message and exits with `exit_code`. A traceback means a bug.
"""

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple


class TelescopeError(Exception):
    """Base class of every error that Telescope raises on purpose."""

    exit_code = 1
    is_transient = False
    """Whether it says nothing of what the policy answered, so that a rollout that fails with it is
    played again."""


class ConfigError(TelescopeError):
    """A setting, flag or file from the user cannot be used."""

    exit_code = 2


class ContextLengthError(ConfigError):
    """The conversation leaves no room in the model's context for another turn."""


class TemplateLossError(ConfigError):
    """The policy's chat template would drop something that rollouts depend on.

    It would lose it again in another attempt, so the refusal is final and ends the run.
    """


class UnplayableError(ConfigError):
    """An environment cannot give usable rollouts with its present settings or range of rewards.

    Another attempt, or another rollout, would end the same way, so it is final and ends the run.
    """


class UnknownNameError(ConfigError):
    """A name is not known; the message lists the closest known names."""


class NotInstalledError(UnknownNameError):
    """An environment is not here; the message has the command that installs it."""

    exit_code = 3


class EnvironmentLoadError(TelescopeError):
    """An environment is missing, or its code could not be loaded."""

    exit_code = 3


class CodeRaisedError(EnvironmentLoadError):
    """An environment's code, in its own process, raised an error of a class that is not known here.

    The message begins with the name of that class.
    """


class DuplicateIdError(EnvironmentLoadError):
    """Two examples of one split have the same id."""


class RegistryError(TelescopeError):
    """The registry cannot be read, or a file in it does not match its record."""

    exit_code = 4


class SpentTokens(NamedTuple):
    """Tokens of requests, as the endpoint counted them."""

    prompt: int = 0
    completion: int = 0


NOTHING_SPENT = SpentTokens()


PASSING = (401, 408, 429)
"""HTTP statuses below 500 that say nothing of the request itself."""


class EndpointError(TelescopeError):
    """A model endpoint failed, did not answer, or gave an invalid reply."""

    exit_code = 5

    def __init__(
        self,
        message: str = "",
        *,
        status: int | None = None,
        answer: str = "",
        num_retries: int = 0,
        spent: SpentTokens | None = NOTHING_SPENT,
    ) -> None:
        """`status` and `answer`: the HTTP status and the text that came with it, if any came.

        `num_retries`: times that the request was sent again before it was given up. `spent`: the
        tokens that were counted though no answer can be used; None = how many is not known.
        """
        super().__init__(message)
        self.status = status
        self.answer = answer
        self.num_retries = num_retries
        self.spent = spent
        self.is_filtered = False
        """Whether a content filter kept it from answering, as its error code says."""
        self.is_of_code = False
        """Whether code of an environment, which the endpoint runs, raised at what it was asked."""

    @property
    def is_of_request(self) -> bool:
        """Whether the endpoint refused this one request, such as one that is too long."""
        refused = self.status is not None and 400 <= self.status < 500
        return refused and self.status not in PASSING

    @property
    def is_transient(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the endpoint failed, rather than refuse what it was asked or raise at it."""
        return not (self.is_of_request or self.is_of_code)


class EndpointLostError(EndpointError):
    """There is no server to answer, and none came back in time."""


class EndpointAccessError(EndpointError):
    """An endpoint refuses every request: its key, the permission, the model or the URL is wrong."""

    @property
    def is_of_request(self) -> bool:
        """False: no other request would be answered either."""
        return False


class JudgeError(EndpointError):
    """A judge or simulated user gave no usable answer; the rollout fails and has no reward.

    It is played again only if the error comes from one that is transient, such as of the endpoint.
    """

    @property
    def is_transient(self) -> bool:
        """False: what no judge can read would be replaced by an answer that it can."""
        return False


class NotGradedError(TelescopeError):
    """A saved rollout cannot be graded again, because its record does not hold enough."""


class NotAskedError(TelescopeError):
    """A judge or simulated user was needed where none may be called, such as by `rescore`."""


class ProcessDiedError(TelescopeError):
    """A process that this run depends on has died; the message names it."""

    exit_code = 6
    is_transient = True


class EnvironmentProcessError(ProcessDiedError):
    """An environment's process died, hung or became unreachable, and its rollouts are lost.

    This says nothing about the policy: a lost rollout is played again and never gets a reward.
    """


class ContradictionError(EnvironmentProcessError):
    """A worker contradicts its record or the first worker, about its secrets or its version.

    All workers run the same code, so this ends the run: another worker would do the same.
    """

    exit_code = 3


class RolloutCrashError(ProcessDiedError):
    """The code of a rollout, or of its group's reward, ended the process that played it.

    Another attempt might end another process with all of its rollouts, so this is final.
    """

    is_transient = False


class NotWrittenError(TelescopeError):
    """A file could not be written, such as to a file system that became read-only."""

    is_transient = True


class NoRoomError(NotWrittenError):
    """A file could not be written: no room for it, or as many files as allowed are open."""

    CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    """`errno` of a system error that means a lack of room."""


class TooManyFailedError(TelescopeError):
    """An eval was played, but too many of its rollouts failed to go on, or to trust the rest."""

    exit_code = 7


class CodeExitError(TelescopeError):
    """An environment's code ended the program, with `sys.exit` or an error beyond `Exception`."""


class StrayCancelError(TelescopeError):
    """An environment's code raised CancelledError, though nobody cancelled the rollout.

    Such cancellations come of scopes and time limits of libraries, as around connections.
    """

    is_transient = True


class RewardError(TelescopeError):
    """A reward or metric function broke its contract (no number, or outside its own range).

    It says the same of each attempt with that answer, so the rollout is not played again: other
    answers would take the place of those that cannot be scored.
    """


class RewardRaisedError(RewardError):
    """A reward or metric function raised an error, which is final like a broken contract.

    Unless that error is transient; then another attempt may not meet it.
    """

    def __init__(self, message: str = "", *, is_transient: bool = False) -> None:
        """`is_transient`: whether the error that was raised is, as `retries.is_transient` says."""
        super().__init__(message)
        self.is_transient = is_transient


MAX_LISTED = 40
"""Most known names that an error lists; a longer list would bury the message."""


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return up to three known names close to `name`, best first; case and `-`/`_` are ignored."""
    by_plain = {key.lower().replace("-", "_"): key for key in known}
    matches = get_close_matches(name.lower().replace("-", "_"), by_plain, n=3, cutoff=0.6)
    return [by_plain[match] for match in matches]


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UnknownNameError:
    """Build the error for an unknown `name`: it lists the closest names, or else all known ones."""
    names = sorted(known)
    close = nearest(name, names)
    if close:
        advice = f"did you mean {' or '.join(repr(match) for match in close)}?"
    elif len(names) > MAX_LISTED:
        advice = f"none of the {len(names)} known names is close to it"
    else:
        advice = f"known: {', '.join(names) or 'none'}"
    return UnknownNameError(f"unknown {kind} {name!r}; {advice}{f' {hint}' if hint else ''}")
