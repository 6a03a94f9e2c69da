"""Turn errors of environment code outside `Exception` into errors that fail one rollout.

asyncio stops its loop for a SystemExit, and treats a CancelledError as a requested cancellation.
Environment code raises both by accident: a library's main function calls `sys.exit`, or an
abandoned scope cancels its task. Extension modules raise panics outside `Exception`.
"""

import asyncio
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

from telescope_core.base.code_places import raised_at
from telescope_core.base.errors import CodeExitError, StrayCancelError

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


def as_failure(error: BaseException) -> Exception:
    """Return `error` as an exception that fails a rollout.

    Raises it again when it is meant for the process or the task: an interrupt from the keyboard,
    the exit of a signal handler, or a cancellation that was asked of the current task.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, asyncio.CancelledError):
        if _is_being_cancelled():
            raise error
        return StrayCancelError(stray_cancel(raised_at(error)))
    if isinstance(error, GeneratorExit) or _is_of_process(error):
        raise error
    what = f"{error!r} was raised"
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) was called"
    return CodeExitError(
        f"{what}{raised_at(error)}; environment code must not end the program: raise an Exception, "
        "which fails no more than its rollout"
    )


def stray_cancel(place: str) -> str:
    """Return the message for a CancelledError at `place` that nobody requested."""
    return (
        f"CancelledError was raised{place}, though nobody cancelled the rollout; look for a task, "
        "a future or a cancel scope that the environment's code cancels and then waits for"
    )


@contextmanager
def contained() -> Generator[None, None, None]:
    """Turn an error raised in the block that is no Exception into one that fails a rollout."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise as_failure(error) from error


def _is_being_cancelled() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread without a loop, which nobody can cancel
        return False
    return task is not None and task.cancelling() > 0


def _is_of_process(error: BaseException) -> bool:
    if threading.current_thread() is not threading.main_thread():
        return False  # Python runs handlers of signals in the main thread alone
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(KeyboardInterrupt) is not None
    if isinstance(error, KeyboardInterrupt):
        return True
    handlers = (signal.getsignal(getattr(signal, name)) for name in _ENDING)
    codes = [getattr(one, "__code__", None) for one in handlers]
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and innermost.tb_frame.f_code in codes
