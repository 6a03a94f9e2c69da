"""Playing a rollout again after a failure: one rule for training and evals.

A limit that was reached (deadline, context length, tokens) is an outcome of the rollout, whether it
could be scored or not. Playing it again would favor short answers, and would cost as much as the
first time. A score that breaks its contract is the same for each attempt. Everything else that
fails may be a failure of infrastructure, so it is played again a few times.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from telescope_core.base.errors import (
    CodeRaisedError,
    ContextLengthError,
    EndpointAccessError,
    EndpointError,
    JudgeError,
    RewardError,
    RewardRaisedError,
    RolloutCrashError,
    TemplateLossError,
    UnplayableError,
)
from telescope_core.base.terminal import whole
from telescope_core.base.types import Rollout, RolloutStatus, StopReason

MAX_FAILED = 3
"""Attempts that may fail before the failure is final."""
MAX_LOST = 5
"""Further attempts that may be lost because the environment's process died during them.

They are counted apart: a process plays many rollouts, and most of those that die with it are not
the reason for its death. Where another rollout is known to be the reason, the loss is not counted.
"""
_TOO_LONG = ("context length", "context_length", "max_model_len")
"""Texts in errors of vLLM and of the OpenAI API for a prompt that does not fit the model."""
_FINAL = (RolloutCrashError.__name__, RewardError.__name__)
"""Failures that another attempt would repeat."""
_OF_CODE = frozenset(
    {
        *("ArithmeticError", "AssertionError", "AttributeError", "FloatingPointError"),
        *("IndexError", "JSONDecodeError", "KeyError", "LookupError", "NameError"),
        *("NotImplementedError", "OverflowError", "RecursionError", "SyntaxError", "TypeError"),
        *("UnboundLocalError", "UnicodeDecodeError", "UnicodeEncodeError", "ValidationError"),
        *("ValueError", "ZeroDivisionError"),
    }
)
"""Errors with which code meets a value that it was not written for, and no network or machine that
fails for a while."""
_ENDS_ALL = {
    error.__name__: error for error in (EndpointAccessError, TemplateLossError, UnplayableError)
}
"""Errors after which no rollout can be played, or none as the settings say."""


async def play_with_attempts(
    play: Callable[[int], Awaitable[Rollout]],
    *,
    first: int = 1,
    max_failed: int = MAX_FAILED,
    on_failure: Callable[[Rollout], None] = lambda rollout: None,
    on_replaced: Callable[[Rollout], None] = lambda rollout: None,
) -> Rollout:
    """Play until an attempt is final and return it; from the second on, it has the tag `attempts`.

    `play` takes the number of the attempt, from `first` on. `on_failure` gets every attempt that
    failed, the last one included, and `on_replaced` each that another one follows.
    """
    num_failed = num_lost = num_innocent = 0
    while True:
        attempt = first + num_failed + num_lost + num_innocent
        rollout = replace(await play(attempt), attempt=attempt)
        if attempt > 1:
            rollout = replace(rollout, tags={**rollout.tags, "attempts": str(attempt)})
        if rollout.status is not RolloutStatus.FAILED:
            return rollout
        on_failure(rollout)
        if rollout.is_innocent:
            num_innocent += 1
        elif rollout.is_lost:
            num_lost += 1
        else:
            num_failed += 1
        if (
            reached_limit(rollout)
            or ends_all(rollout)
            or rollout.status_reason in _FINAL
            or is_of_answer(rollout)
            or num_failed >= max_failed
            or num_lost > MAX_LOST
        ):
            return rollout
        on_replaced(rollout)


def is_of_answer(rollout: Rollout) -> bool:
    """Return whether the environment's code failed at what the policy answered, as far as is known.

    It is not played again: a reward that raises for some wrong answers would otherwise have them
    replaced by others, of which more are right.
    """
    if not rollout.turns or rollout.tags.get("failed_in") not in ("play", "reward"):
        return False
    kind = rollout.status_reason
    if kind == RewardRaisedError.__name__:  # "Class.method raised KeyError: ..."
        kind = (rollout.error or "").partition(" raised ")[2].partition(":")[0]
    return kind in _OF_CODE


def reached_limit(rollout: Rollout) -> bool:
    """Return whether a failed rollout ended at its deadline or at the length of the context.

    Most rollouts that reach a limit are scored as they stand. Those here could not be: nothing was
    written yet, or the environment raised when the limit came.
    """
    if rollout.stop_reason in (StopReason.TIMEOUT, StopReason.CONTEXT_LENGTH):
        return True
    kind, _, text = (rollout.error or "").partition(": ")
    if kind == ContextLengthError.__name__:
        return True
    return kind == EndpointError.__name__ and says_too_long(text)


def ends_all(rollout: Rollout) -> bool:
    """Return whether a rollout failed for a reason that would fail every other attempt or rollout.

    An endpoint refuses every request, the policy's chat template would lose something, or the
    settings of the environment cannot work.
    """
    return rollout.status is RolloutStatus.FAILED and rollout.status_reason in _ENDS_ALL


def require_others(rollout: Rollout, where: str) -> None:
    """Raise the error of a rollout for which `ends_all` is true; `where` begins the message."""
    if ends_all(rollout):
        kind, _, cause = (rollout.error or "").partition(": ")
        error = _ENDS_ALL[rollout.status_reason]
        if error is UnplayableError and rollout.example_id:
            # It may be the only one of a folder of tasks.
            where += f", example {rollout.example_id!r}"
        raise error(f"{where}: {cause or kind}")


def is_too_long(error: Exception) -> bool:
    """Return whether the policy refused a request because its prompt does not fit the model."""
    if isinstance(error, ContextLengthError):
        return True
    # The endpoint of a judge has a context of its own, which is no limit of the policy.
    is_of_policy = isinstance(error, EndpointError) and not isinstance(error, JudgeError)
    return is_of_policy and says_too_long(str(error))


def says_too_long(text: str) -> bool:
    """Return whether an endpoint's error says that a prompt does not fit the model."""
    return any(mark in text.lower() for mark in _TOO_LONG)


def failure_text(error: Exception) -> str:
    """Return the error of a rollout that `error` failed: the name, the message and the notes."""
    text = message_with_notes(error)
    return text if isinstance(error, CodeRaisedError) else f"{type(error).__name__}: {text}"


def message_with_notes(error: BaseException) -> str:
    """Return the message of `error`, and its notes in parentheses."""
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{error} ({notes})" if notes else str(error)


def as_failed(rollout: Rollout, error: str, stop_reason: StopReason = StopReason.ERROR) -> Rollout:
    """Return `rollout` as one that failed with `error`, which begins with the error's name."""
    return replace(
        rollout,
        status=RolloutStatus.FAILED,
        status_reason=error.partition(":")[0],
        stop_reason=stop_reason,
        error=whole(error),
        reward=None,
    )


def as_cancelled(rollout: Rollout) -> Rollout:
    """Return `rollout` as one that was cancelled on request."""
    cancelled, reason = RolloutStatus.CANCELLED, StopReason.CANCELLED
    return replace(rollout, status=cancelled, status_reason="cancelled", stop_reason=reason)
