"""One GET that ends: bounded in bytes, in time, in tries and in redirects.

The token goes to the registry's own host and port and nowhere else. Redirects are followed by hand,
because whether the next host may be asked, and what it may be told, is decided here.
"""

import os
import random
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from urllib.parse import urljoin, urlsplit

import httpx

from telescope_core.errors import RegistryError
from telescope_envs.addresses import is_loopback, origin_of
from telescope_envs.credentials import Token
from telescope_envs.registry.watchdog import Watchdog

_MAX_REDIRECTS = 5
_SETTLED_S = 2.0
_TRY_AGAIN = {429, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_NOT_THERE = {404, 410}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait, and how often to try."""

    total_s: float = 60.0
    """For one file, all tries together."""
    silence_s: float = 15.0
    """Longest wait for a connection, or for the next bytes."""
    max_tries: int = 4
    first_pause_s: float = 0.25
    """Before the second try; twice as long before each further one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A file, or that it is not there, or that it has not changed."""

    status: int
    """200, 304 or 404."""
    body: bytes = b""
    etag: str = ""
    last_modified: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One file that is asked for."""

    url: str
    max_bytes: int
    patience: Patience
    headers: Mapping[str, str]
    deadline_s: float
    """On the monotonic clock."""


class _TryAgainError(Exception):
    """This try failed in a way that the next one may not; `wait_s` is what the server asks for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Fetcher:
    """Fetches for the registry at `address`; makes its connections when they are needed."""

    def __init__(self, address: str, token: Token | None, login_hint: str) -> None:
        self._origin = origin_of(address)
        self._token = token
        self._login_hint = login_hint
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Let go of connections; fine to call twice."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(
        self, url: str, *, max_bytes: int, patience: Patience, headers: Mapping[str, str]
    ) -> Answer:
        """Return what is at `url`; raises RegistryError that names it, whatever went wrong."""
        task = _Task(
            url=url,
            max_bytes=max_bytes,
            patience=patience,
            headers=headers,
            deadline_s=time.monotonic() + patience.total_s,
        )
        for tried in range(patience.max_tries):
            try:
                return self._follow(task)
            except _TryAgainError as error:
                backoff_s = patience.first_pause_s * 2**tried * random.uniform(0.5, 1.0)
                pause_s = error.wait_s or backoff_s
                is_last = tried + 1 == patience.max_tries
                if is_last or time.monotonic() + pause_s > task.deadline_s:
                    raise RegistryError(_gave_up(url, error, tried + 1)) from None
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _follow(self, task: _Task) -> Answer:
        here = task.url
        for _ in range(_MAX_REDIRECTS + 1):
            self._require_allowed(here, task.url)
            found = self._ask(here, task)
            if isinstance(found, Answer):
                return found
            here = _next_address(here, found, task.url)
        raise RegistryError(f"{task.url}: more than {_MAX_REDIRECTS} redirects; check the address")

    def _ask(self, url: str, task: _Task) -> Answer | str:
        """Return the answer, or the address that it redirects to."""
        patience, remaining_s = task.patience, task.deadline_s - time.monotonic()
        late = f"not done within {patience.total_s:g} s"
        if remaining_s <= 0:
            raise _TryAgainError(late)
        own = {"Authorization": f"Bearer {self._token}"} if self._may_see_token(url) else {}
        with Watchdog(remaining_s) as watchdog:
            try:
                with self._opened().stream(
                    "GET",
                    url,
                    headers={**task.headers, **own},
                    timeout=min(patience.silence_s, remaining_s),
                    extensions={"trace": watchdog.trace},
                ) as response:
                    return self._read(response, url, task.max_bytes)
            except httpx.InvalidURL as error:
                raise RegistryError(f"{url} is not an address: {error}") from None
            except httpx.TransportError as error:
                reason = late if watchdog.has_barked else _reason(error, patience)
                raise _TryAgainError(reason) from None

    def _read(self, response: httpx.Response, url: str, max_bytes: int) -> Answer | str:
        status = response.status_code
        if status in _REDIRECTS:
            return response.headers.get("Location", "")
        if status in _TRY_AGAIN:
            raise _TryAgainError(f"answered {status}", _wished_wait_s(response))
        if status in _NOT_THERE:
            return Answer(status=404)
        if status == 304:
            return Answer(status=304)
        if status != 200:
            raise RegistryError(self._refusal(url, status))
        return Answer(
            status=200,
            body=_bounded_body(response, url, max_bytes),
            etag=response.headers.get("ETag", ""),
            last_modified=_settled_time(response),
        )

    def _refusal(self, url: str, status: int) -> str:
        if status not in (401, 403):
            return f"{url} answered {status}; expected 200 or 404: check the address"
        if origin_of(url) != self._origin:
            return f"{url} answered {status}; it is not on the registry's host, so no token is sent"
        if self._token is None:
            return f"{url} answered {status}: the registry asks for a token; {self._login_hint}"
        return f"{url} answered {status}: the token is not accepted; {self._login_hint}"

    def _may_see_token(self, url: str) -> bool:
        return self._token is not None and origin_of(url) == self._origin

    def _require_allowed(self, here: str, asked: str) -> None:
        parts, origin = urlsplit(here), origin_of(here)
        if parts.scheme not in ("http", "https") or not origin[1] or "@" in parts.netloc:
            raise RegistryError(f"{asked} leads to {parts.scheme}://..., which is not fetched")
        is_private = origin == self._origin or is_loopback(origin[1])
        if parts.scheme == "http" and not is_private:
            raise RegistryError(
                f"{here} is plain http, which anyone on the way can change; it is not fetched"
            )

    def _opened(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(
                follow_redirects=False,
                verify=tls_context(os.environ.get("SSL_CERT_FILE", "")),
                headers={
                    "User-Agent": f"telescope-envs/{version('telescope-envs')}",
                    # What is unpacked on the way could be of any size, and hashes are of the file.
                    "Accept-Encoding": "identity",
                },
            )
        return self._client


@cache
def tls_context(certificates: str) -> ssl.SSLContext:
    """Return how hosts are recognised; reading all the certificates takes a while, so once.

    `certificates` is the SSL_CERT_FILE that httpx reads.
    """
    del certificates
    return httpx.create_ssl_context()


def _next_address(here: str, location: str, asked: str) -> str:
    if not location:
        raise RegistryError(f"{here} redirects, but does not say where to")
    try:
        there = urljoin(here, location)
        origin_of(there)
    except ValueError as error:
        raise RegistryError(f"{asked} leads to {location!r}, no address: {error}") from None
    if urlsplit(here).scheme == "https" and urlsplit(there).scheme != "https":
        raise RegistryError(
            f"{asked} leads from https to {urlsplit(there).scheme}, which is never followed; "
            "tell the registry's keepers"
        )
    return there


def _bounded_body(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    too_long = f"{url}: longer than {max_bytes} bytes, the most that is read of it"
    packing = response.headers.get("Content-Encoding", "identity")
    if packing != "identity":
        raise RegistryError(f"{url} came packed as {packing}; serve it as it is")
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise RegistryError(too_long)
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise RegistryError(too_long)
    return bytes(body)


def _settled_time(response: httpx.Response) -> str:
    """Return Last-Modified where it tells versions apart: it counts whole seconds.

    A file that changed in the second in which it was sent may change in it again, unseen.
    """
    text = response.headers.get("Last-Modified", "")
    with suppress(ValueError):
        sent = parsedate_to_datetime(response.headers.get("Date", ""))
        if (sent - parsedate_to_datetime(text)).total_seconds() >= _SETTLED_S:
            return text
    return ""


def _wished_wait_s(response: httpx.Response) -> float:
    """Return the seconds of Retry-After, a number or a date; 0 without one."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    with suppress(ValueError):
        moment = parsedate_to_datetime(text)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (moment - datetime.now(UTC)).total_seconds())
    return 0.0


def _reason(error: httpx.TransportError, patience: Patience) -> str:
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {patience.silence_s:g} s"
    if isinstance(error, httpx.TimeoutException):
        return f"nothing came for {patience.silence_s:g} s"
    return str(error) or type(error).__name__


def _gave_up(url: str, error: _TryAgainError, num_tries: int) -> str:
    asked = f" and asks to wait {error.wait_s:.0f} s" if error.wait_s else ""
    times = "1 try" if num_tries == 1 else f"{num_tries} tries"
    return f"{url}: {error}{asked} ({times}); check the address and the network, then try again"
