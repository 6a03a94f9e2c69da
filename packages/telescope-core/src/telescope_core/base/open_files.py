"""The number of files and connections that a process may have open: `ulimit -n`.

Many systems begin with a soft limit of 1024 or less, for programs that use `select`, which takes no
higher descriptors. Nothing here does, so commands that play many rollouts raise it.
"""

import errno
import math
import resource
import select
from contextlib import suppress

from telescope_core.base.errors import ConfigError

_ENOUGH = 65_536
"""Raised beyond this only on demand: some programs look at every descriptor they may have."""
_LIMIT = "--concurrency (in training: max_open_rollouts)"
_RESERVE = 128
"""Descriptors for all but the rollouts: files, libraries, environment processes."""


def raise_limit(*, least: int = 0) -> int:
    """Raise this process's soft limit toward the hard one, to at least `least` if that allows it.

    Processes that are started later inherit it. Returns the limit that now holds.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = _number(soft), _number(hard)
    wanted = min(most, max(_ENOUGH, least))
    # macOS has a further limit, which it does not tell.
    for limit in (wanted, 10_240, 4096):
        if soft < limit <= most:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
                return limit
    return soft


def require_open(num_rollouts: int) -> None:
    """Raise ConfigError if not even one connection for each of `num_rollouts` can be open."""
    limit = raise_limit(least=num_rollouts + _RESERVE)
    if num_rollouts + _RESERVE > limit:
        raise ConfigError(
            f"{num_rollouts} rollouts at the same time need as many connections and {_RESERVE} "
            f"files more, but this process may have only {limit} open; lower --concurrency to "
            f"{max(1, limit - _RESERVE)}, or raise the hard limit (ulimit -Hn, as root)"
        )


def advice_for(error: BaseException) -> str:
    """Return why `error` came and what to do, if no more can be opened; empty for other errors."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EMFILE:
        limit = _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return (
            f"this process has as many files and connections open as it may ({limit}); raise the "
            f"limit with ulimit -n, or lower {_LIMIT}"
        )
    if code == errno.ENFILE:
        return (
            "all processes of this machine together have as many files and connections open as "
            f"they may (fs.file-max); end others, raise that limit, or lower {_LIMIT}"
        )
    return ""


def is_ready(*descriptors: int, wait_s: float, to_write: bool = False) -> bool:
    """Wait until one of `descriptors` can be read, or written; returns whether one can be.

    As `select.select`, which fails for descriptors from 1024 on.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLOUT if to_write else select.POLLIN)
    return bool(poll.poll(math.ceil(wait_s * 1000)))


def _number(limit: int) -> int:
    """Return a limit of the system as a number; the system has a code for none."""
    return 2**31 if limit == resource.RLIM_INFINITY else limit
