"""HTTP GET with limits on bytes, time, tries and redirects.

The token is sent to the registry's own host and port and nowhere else. Redirects are followed in
this module, which decides whether the next host may be contacted and whether it gets the token. No
registry sends its clients to their own machine or network, unless it is there itself.
"""

import os
import random
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import IntEnum
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from ipaddress import ip_address
from threading import Timer
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec

from telescope_core.base.addresses import is_loopback
from telescope_core.base.errors import ConfigError, RegistryError
from telescope_core.base.terminal import foreign
from telescope_envs.registry.config import origin_of
from telescope_envs.registry.credentials import Token
from telescope_envs.registry.http_cache import CachedFile


class Watchdog:
    """Ends reads on the connections that it has seen when its time is over."""

    def __init__(self) -> None:
        self.has_barked = False
        self._sockets: list[socket.socket] = []

    @contextmanager
    def watching(self, limit_s: float) -> Generator[None]:
        """End the reads in the `with` block after `limit_s` seconds."""
        timer = Timer(limit_s, self._bark)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def trace(self, event: str, details: dict[str, Any]) -> None:
        """Remember the socket of each new connection; httpx's `trace` extension calls this."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            found = details["return_value"].get_extra_info("socket")
            if found is not None:
                self._sockets.append(found)

    def _bark(self) -> None:
        self.has_barked = True
        for found in self._sockets:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


class Reach(IntEnum):
    """The networks from which a host can be reached, nearest first."""

    MACHINE = 0
    """Only from this machine."""
    NETWORK = 1
    """From the network of this machine."""
    INTERNET = 2
    """From everywhere, or only through a proxy, which looks up the name itself."""


def reach_of(host: str) -> Reach:
    """Return the nearest network from which the addresses of `host` can be reached."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return Reach.INTERNET
    nearest = Reach.INTERNET
    for text in found:
        number = ip_address(text.partition("%")[0])
        number = getattr(number, "ipv4_mapped", None) or number
        if number.is_loopback or number.is_unspecified:
            return Reach.MACHINE
        if not number.is_global:
            nearest = Reach.NETWORK
    return nearest


class Explained(msgspec.Struct, frozen=True):
    """The body of a refusal by a registry server."""

    error: str
    what_to_do: str


_EXPLAINED = msgspec.json.Decoder(Explained)
_MAX_EXPLAINED_BYTES = 16 * 1024
_MOST_EXPLAINED_CHARACTERS = 500


def explanation_in(body: bytes) -> Explained | None:
    """Return the explanation in a refusal, on one line and safe to show; None if it has none."""
    try:
        said = _EXPLAINED.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    error, what_to_do = (
        foreign(" ".join(text.split()), _MOST_EXPLAINED_CHARACTERS)
        for text in (said.error, said.what_to_do)
    )
    return Explained(error=error, what_to_do=what_to_do)


_MAX_REDIRECTS = 5
_SETTLED_S = 2.0
_TRY_AGAIN = {429, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_NOT_THERE = {404, 410}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits and number of tries."""

    total_s: float = 60.0
    """Time limit for one file, over all tries."""
    silence_s: float = 15.0
    """Longest wait for a connection, or for the next bytes."""
    max_tries: int = 4
    first_pause_s: float = 0.25
    """Pause before the second try; it doubles before each further try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One file to fetch."""

    url: str
    max_bytes: int
    patience: Patience
    headers: Mapping[str, str]
    deadline_s: float
    """On the monotonic clock, in seconds."""


class _TryAgainError(Exception):
    """This try failed but the next may succeed.

    `wait_s` is the wait that the server asks for, and `said` its explanation, if it gives one.
    """

    def __init__(self, reason: str, wait_s: float = 0.0, said: Explained | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.said = said


class Fetcher:
    """Fetches files for the registry at `address`; connections are opened when first needed."""

    def __init__(self, address: str, token: Token | None, login_hint: str) -> None:
        self._address = address
        self._origin = origin_of(address)
        self._host = self._origin[1] if "://" in address else "localhost"
        if address.startswith("hf://"):
            endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
            self._host = urlsplit(endpoint).hostname or ""
        self._token = token
        self._login_hint = login_hint
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Close connections; calling it twice is fine."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(
        self, url: str, *, max_bytes: int, patience: Patience, headers: Mapping[str, str]
    ) -> CachedFile:
        """Return the body at `url`; raises RegistryError that names `url` on any failure."""
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
                    asked = f" and asks to wait {error.wait_s:.0f} s" if error.wait_s else ""
                    times = "1 try" if not tried else f"{tried + 1} tries"
                    advice = "; check the address and the network, then try again"
                    if error.said is not None:
                        advice = f": {error.said.error}; {error.said.what_to_do}"
                    raise RegistryError(f"{url}: {error}{asked} ({times}){advice}") from None
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _follow(self, task: _Task) -> CachedFile:
        here = task.url
        for _ in range(_MAX_REDIRECTS + 1):
            self._require_allowed(here, task.url)
            found = self._ask(here, task)
            if isinstance(found, CachedFile):
                return found
            here = _next_address(here, found, task.url)
        raise RegistryError(f"{task.url}: more than {_MAX_REDIRECTS} redirects; check the address")

    def _ask(self, url: str, task: _Task) -> CachedFile | str:
        """Return the answer, or the address that it redirects to."""
        patience, remaining_s = task.patience, task.deadline_s - time.monotonic()
        late = f"not finished within {patience.total_s:g} s"
        if remaining_s <= 0:
            raise _TryAgainError(late)
        is_own = self._token is not None and origin_of(url) == self._origin
        own = {"Authorization": f"Bearer {self._token}"} if is_own else {}
        watchdog = Watchdog()
        try:
            with (
                watchdog.watching(remaining_s),
                self._opened().stream(
                    "GET",
                    url,
                    headers={**task.headers, **own},
                    timeout=min(patience.silence_s, remaining_s),
                    extensions={"trace": watchdog.trace},
                ) as response,
            ):
                return self._read(response, url, task.max_bytes)
        except httpx.InvalidURL as error:
            raise RegistryError(f"{url} is not a valid URL: {error}") from None
        except httpx.TransportError as error:
            reason = late if watchdog.has_barked else _reason(error, patience)
            raise _TryAgainError(reason) from None

    def _read(self, response: httpx.Response, url: str, max_bytes: int) -> CachedFile | str:
        status = response.status_code
        if status in _REDIRECTS:
            return response.headers.get("Location", "")
        if status in _TRY_AGAIN:
            said = self._explanation(url, response)
            raise _TryAgainError(f"answered {status}", _wished_wait_s(response), said)
        if status in _NOT_THERE:
            return CachedFile(status=404)
        if status == 304:
            return CachedFile(status=304)
        if status != 200:
            raise RegistryError(self._refusal(url, response))
        return CachedFile(
            status=200,
            body=_bounded_body(response, url, max_bytes),
            etag=response.headers.get("ETag", ""),
            last_modified=_settled_time(response),
        )

    def _refusal(self, url: str, response: httpx.Response) -> str:
        status, said = response.status_code, self._explanation(url, response)
        is_login = status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        if said is not None and status != HTTPStatus.UNAUTHORIZED:
            return f"{url} answered {status}: {said.error}; {said.what_to_do}"
        if status == HTTPStatus.UNAVAILABLE_FOR_LEGAL_REASONS:
            return f"{url} is withheld by its host (451); ask the registry's maintainers why"
        if not is_login:
            return f"{url} answered {status}; expected 200 or 404: check the address"
        if origin_of(url) != self._origin:
            return f"{url} answered {status}; it is not on the registry's host, so it got no token"
        if self._token is None:
            return f"{url} answered {status}: the registry requires a token; {self._login_hint}"
        why = said.error if said is not None else "the token was not accepted"
        return f"{url} answered {status}: {why}; {self._login_hint}"

    def _explanation(self, url: str, response: httpx.Response) -> Explained | None:
        """Return what the registry itself says of a failure; other hosts give nobody advice."""
        is_own = origin_of(url) == self._origin
        return explanation_in(_beginning(response)) if is_own else None

    def _require_allowed(self, here: str, asked: str) -> None:
        try:
            parts, origin = urlsplit(here), origin_of(here)
        except ValueError as error:
            raise RegistryError(f"{asked} is not a URL: {error}; update the registry") from None
        if parts.scheme not in ("http", "https") or not origin[1] or "@" in parts.netloc:
            raise RegistryError(f"{asked} leads to {parts.scheme}://..., which is never fetched")
        is_private = origin == self._origin or is_loopback(origin[1])
        if parts.scheme == "http" and not is_private:
            raise RegistryError(
                f"{here} is plain http, which anyone on the network can change; it was not fetched"
            )
        if origin == self._origin:
            return
        reach = reach_of(origin[1])
        if reach is not Reach.INTERNET and reach < reach_of(self._host):
            raise RegistryError(
                f"{asked} leads to {origin[1]}, which is on this machine or in its network, where "
                f"the registry {self._address} is not; it was not asked. Tell the registry's "
                "maintainers"
            )

    def _opened(self) -> httpx.Client:
        if self._client is None:
            self._client = new_client(
                self._address,
                headers={
                    "User-Agent": f"telescope-envs/{version('telescope-envs')}",
                    # Compressed bodies could unpack to any size, and hashes are of the file.
                    "Accept-Encoding": "identity",
                },
            )
        return self._client


def new_client(
    address: str,
    *,
    base_url: str = "",
    headers: Mapping[str, str] | None = None,
    timeouts: httpx.Timeout | None = None,
) -> httpx.Client:
    """Return a client for the registry at `address`, which follows no redirects.

    Without `timeouts`, only those of each request count. Raises ConfigError if the variables for
    proxies and certificates hold what cannot be used.
    """
    try:
        return httpx.Client(
            base_url=base_url,
            headers=headers,
            timeout=timeouts,
            follow_redirects=False,
            verify=_tls_context(os.environ.get("SSL_CERT_FILE", "")),
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{address} cannot be asked through the proxy that HTTP_PROXY, HTTPS_PROXY or "
            f"ALL_PROXY names: {str(error).rstrip('.')}; name one that speaks HTTP, or unset "
            "the variable"
        ) from None


@cache
def _tls_context(certificates: str) -> ssl.SSLContext:
    """Return the TLS context; cached, because reading all the certificates takes a while.

    `certificates` is the value of SSL_CERT_FILE, which httpx reads by itself.
    """
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        if not certificates:
            raise
        raise ConfigError(
            f"SSL_CERT_FILE is {certificates!r}, from which no certificates can be read: "
            f"{error.strerror or error}; name a file in PEM format, or unset the variable"
        ) from None


def _next_address(here: str, location: str, asked: str) -> str:
    if not location:
        raise RegistryError(f"{here} redirects without a Location header")
    try:
        there = urljoin(here, location)
        origin_of(there)
    except ValueError as error:
        raise RegistryError(f"{asked} leads to {location!r}, not a URL: {error}") from None
    if urlsplit(here).scheme == "https" and urlsplit(there).scheme != "https":
        raise RegistryError(
            f"{asked} redirects from https to {urlsplit(there).scheme}, which is never followed; "
            "tell the registry's maintainers"
        )
    return there


def _bounded_body(response: httpx.Response, url: str, max_bytes: int) -> bytes:
    too_long = f"{url}: longer than {max_bytes} bytes, the limit for this file"
    packing = response.headers.get("Content-Encoding", "identity")
    if packing != "identity":
        raise RegistryError(f"{url} was sent with encoding {packing}; serve it uncompressed")
    announced = response.headers.get("Content-Length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise RegistryError(too_long)
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > max_bytes:
            raise RegistryError(too_long)
    return bytes(body)


def _beginning(response: httpx.Response) -> bytes:
    """Return the first bytes of a refusal; fewer if its host does not send them."""
    body = bytearray()
    with suppress(httpx.TransportError):
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > _MAX_EXPLAINED_BYTES:
                break
    return bytes(body[:_MAX_EXPLAINED_BYTES])


def _settled_time(response: httpx.Response) -> str:
    """Return Last-Modified if it identifies this version of the file; else an empty string.

    It counts whole seconds, so a file that was sent right after its last change could change again
    and keep the same Last-Modified.
    """
    text = response.headers.get("Last-Modified", "")
    # A time without a zone cannot be compared with one that has a zone.
    with suppress(ValueError, TypeError):
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
        return f"no data for {patience.silence_s:g} s"
    return str(error) or type(error).__name__
