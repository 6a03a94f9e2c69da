"""Playing a rollout again after a failure: one rule for training and evals.

A limit that was reached (deadline, context length, tokens) is an outcome of the rollout, whether it
could be scored or not. Playing it again would favor short answers, and would cost as much as the
first time. What an environment's code raises at an answer is final too: another answer would take
the place of one that cannot be scored. A failure of infrastructure is played again a few times.
"""

import asyncio
import builtins
import errno
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import BrokenExecutor
from dataclasses import replace
from gzip import BadGzipFile
from typing import cast

from telescope_core.base import errors
from telescope_core.base.errors import (
    PASSING,
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
_TOO_LONG = re.compile(
    # OpenAI and most that follow it, vLLM, SGLang, llama.cpp, LM Studio, MiniMax, Atlas
    r"context[ _-]?(?:length|window|size)|max_model_len|max_seq_len"
    # Anthropic, Bedrock, Z.ai
    r"|(?:prompt|input)(?: is)? too long"
    # Gemini, GitHub, NIM, OpenRouter, Z.ai
    r"|(?:prompt|input)[^.;]{0,40} exceeds (?:the )?(?:max|limit)"
    # xAI; Groq and Cerebras; Moonshot; DashScope
    r"|maximum prompt length|reduce the length of the messages|exceeded model token limit"
    r"|range of input length"
    # Text Generation Inference; Cohere
    r"|`inputs` (?:tokens|must have less)|tokens in the prompt cannot exceed",
    re.IGNORECASE,
)
"""How servers and providers say that a prompt does not fit the model."""
_FINAL = (RolloutCrashError.__name__, RewardError.__name__)
"""Failures that another attempt would repeat."""
FAILED_BY = "failed_by"
"""Tag of a failed rollout: `outside` if its error is transient, otherwise `code`."""
_OUTSIDE, _CODE = "outside", "code"
_NETWORK = frozenset(
    {
        *("aiohttp", "botocore", "docker", "grpc", "http", "httpcore", "httpx"),
        *("requests", "urllib", "urllib3", "websockets"),
    }
)
"""Packages whose errors say that a connection or the other side failed."""
_OF_FILES = (
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError),
    *(PermissionError, BadGzipFile),
)
_OF_VALUES = frozenset(
    {
        *(errno.E2BIG, errno.EILSEQ, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG),
        *(errno.ENOEXEC, errno.ENOTEMPTY),
    }
)
"""`errno` of system errors that come of what was asked for, and would come again."""
_SOUNDS_TRANSIENT = re.compile(r"Conn|Network|HTTP|Http|Protocol|Proxy|Socket|SSL|Sandbox|Server")
"""What names of unknown classes of errors of networks have in them."""
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
    if by := rollout.tags.get(FAILED_BY):
        return by == _CODE
    return not _is_transient_name(rollout.status_reason, rollout.error or "")


def failed_by(error: Exception) -> str:
    """Return the value of the tag `FAILED_BY` for a rollout that failed with `error`."""
    return _OUTSIDE if is_transient(error) else _CODE


def is_transient(error: BaseException) -> bool:
    """Return whether `error`, or one that it came of, says nothing of what the policy answered.

    Such are failures of networks, endpoints, processes and sandboxes, and a lack of memory. All
    others are final, also those of classes that are not known here: what code raises may depend on
    the answer. A time limit of the code itself is final as well, for slow answers would go.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()  # a chain may lead back to where it began
    while left:
        one = left.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, BaseExceptionGroup):
            left += cast(BaseExceptionGroup[BaseException], one).exceptions
        elif _is_transient(one):
            return True
        is_hidden = one.__cause__ is not None or one.__suppress_context__
        left.append(one.__cause__ if is_hidden else one.__context__)
    return False


def _is_transient(error: BaseException) -> bool:
    own: object = getattr(error, "is_transient", None)
    if isinstance(own, bool):
        return own
    status = _status(error)
    if status is not None and status >= 400:
        return status >= 500 or status in PASSING
    if isinstance(error, MemoryError | BrokenExecutor | asyncio.IncompleteReadError):
        return True
    if isinstance(error, ValueError):
        return False
    if isinstance(error, OSError) and not isinstance(error, _OF_FILES):
        is_limit = isinstance(error, TimeoutError) and error.errno is None
        if not is_limit and error.errno not in _OF_VALUES:
            return True
    return any(one.__module__.partition(".")[0] in _NETWORK for one in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of a client for HTTP carries."""
    response: object = getattr(error, "response", None)
    found: tuple[object, ...] = (
        getattr(error, "status", None),
        getattr(error, "status_code", None),
        getattr(response, "status_code", None),
    )
    return next((one for one in found if isinstance(one, int)), None)


def _is_transient_name(kind: str, text: str) -> bool:
    """Return whether an error is transient as far as its name tells, as from an older worker."""
    if kind == RewardRaisedError.__name__:  # "Class.method raised KeyError: ..."
        kind = text.partition(" raised ")[2].partition(":")[0]
    if kind == JudgeError.__name__:
        return "no usable answer in" not in text
    known: object = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return is_transient(known())
        except TypeError:  # those of Unicode and groups need arguments, and code raises them
            return False
    return _SOUNDS_TRANSIENT.search(kind) is not None


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
    return _TOO_LONG.search(text) is not None


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
        # It was said of another error.
        tags={name: value for name, value in rollout.tags.items() if name != FAILED_BY},
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
