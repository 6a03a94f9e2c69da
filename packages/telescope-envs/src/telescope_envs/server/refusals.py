"""Reasons why the server refuses a request, with advice; rate limits per caller."""

import errno
import ipaddress
import sqlite3
import time
from collections import OrderedDict
from http import HTTPStatus

from telescope_core.base.errors import RegistryError


class Refusal(RegistryError):
    """A refused request, with the HTTP status of the response."""

    def __init__(self, status: HTTPStatus, error: str, what_to_do: str) -> None:
        super().__init__(f"{error}; {what_to_do}")
        self.status = status
        self.error = error
        self.what_to_do = what_to_do


def failure_of(error: OSError | sqlite3.Error) -> Refusal:
    """Return an error of the disk or the database as a Refusal with status 507, 503 or 500."""
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            return Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "another process is writing the records of the registry; nothing was stored",
                "try again in a moment",
            )
        is_full = code == sqlite3.SQLITE_FULL
    else:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # of the disk, or of this user
    if is_full:
        return Refusal(
            HTTPStatus.INSUFFICIENT_STORAGE,
            "the disk of the registry is full; nothing was stored",
            "ask whoever runs this registry to make room, then try again",
        )
    return Refusal(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "the registry cannot read or write its records",
        "ask whoever runs this registry to look into its log",
    )


def refusal_of(error: RegistryError) -> Refusal:
    """Return `error` as a Refusal with status 422, splitting off the advice after the last `; `."""
    if isinstance(error, Refusal):
        return error
    what, _, advice = str(error).rpartition("; ")
    if not what:
        what, advice = str(error), "correct it and publish again"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, what, advice)


_MAX_CALLERS = 10_000
_SITE_BITS = 64
"""Length of the IPv6 network that one customer of a provider has."""


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `host` is; None for a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def shared_address(host: str) -> str:
    """Return the address under which connections and requests from `host` are counted."""
    found = address_of(host)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, _SITE_BITS), strict=False))
    return str(found) if found is not None else host


class Limit:
    """Allows each caller `count` actions per `period_s`, refilled evenly; 0 means no limit."""

    def __init__(self, what: str, count: int, period_s: float) -> None:
        self.what = what
        self.count = count
        self.period_s = period_s
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count one action of `caller`; raises Refusal (429) when it has none left."""
        now = time.monotonic()
        left, at = self._left.get(caller, (float(self.count), now))
        left = min(self.count, left + (now - at) * self.count / self.period_s)
        if self.count and left < 1:
            raise Refusal(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"more than {self.count} {self.what} in {self.period_s:g} s",
                "wait a minute and try again",
            )
        self._left[caller] = (left - 1, now)
        self._left.move_to_end(caller)
        if len(self._left) > _MAX_CALLERS:
            self._left.popitem(last=False)
