"""`HttpPool`: a pool of HTTP connections, with deadlines, bounded retries and clear errors.

It transfers bytes without interpreting them. When a server is busy or broken (see `is_passing`, a
refused or dropped connection), the request is retried with growing, jittered pauses until a time
budget is used up. Any other refusal raises EndpointError at once. docs/design explains the choice
of aiohttp.
"""

import asyncio
import os
import random
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from telescope_core.base.addresses import is_loopback
from telescope_core.base.errors import EndpointError
from telescope_core.base.open_files import advice_for
from telescope_core.base.secret_names import HIDDEN, without_passwords
from telescope_core.base.terminal import escaped, foreign
from telescope_core.chat.trouble import Troubles

if TYPE_CHECKING:
    import aiohttp

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0
_QUOTED_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Time limits of a request, in seconds."""

    request_timeout_s: float = 600.0
    """Seconds for one attempt, up to the last byte of the reply. An attempt that exceeds it is not
    retried, because the next one would be as slow."""
    connect_timeout_s: float = 10.0
    """Seconds to open a connection."""
    retry_budget_s: float = 60.0
    """Seconds for which a failed request is retried."""


class _Failure(NamedTuple):
    error: EndpointError
    wait_s: float
    """Seconds that the server asks the client to wait before the next attempt."""


class HttpReply(NamedTuple):
    """A reply with status 200."""

    content: bytes
    num_retries: int
    """Attempts that failed before."""


class Handling(NamedTuple):
    """What the sender of a request knows about its failures."""

    passes: Callable[[EndpointError], bool] = lambda error: False
    """Whether it is sent again after a refusal too, as after that of a busy server."""
    trouble_in: Callable[[bytes], EndpointError | None] = lambda content: None
    """The error of a busy or broken server that came with status 200, if one did."""
    on_cut: Callable[[EndpointError], None] = lambda error: None
    """Called with the last error if it is canceled while it waits to be sent again."""


_PLAIN = Handling()


class HttpPool:
    """Connections to any number of servers, opened without a limit and kept open for reuse.

    A pool belongs to the event loop that makes the first request. Cancelling a request closes its
    connection, so that the server stops working on it.
    """

    def __init__(self) -> None:
        self._opened: aiohttp.ClientSession | None = None
        self._troubles = Troubles()

    async def request(
        self,
        method: Literal["GET", "POST"],
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str],
        limits: RequestLimits,
        handling: Handling = _PLAIN,
    ) -> HttpReply:
        """Return the reply; raises EndpointError that names `url` and what went wrong.

        Its text holds neither a password of the URL nor the key in `headers`.
        """
        if self._opened is None:
            # In a thread, because the slow import would block the event loop of the first request.
            await asyncio.to_thread(import_module, "aiohttp")
        give_up_s = time.monotonic() + limits.retry_budget_s
        pause_s = _FIRST_PAUSE_S
        num_retries = 0
        while True:
            try:
                outcome = await self._attempt(method, url, body, headers=headers, limits=limits)
            except EndpointError as error:
                error.num_retries = num_retries
                if not handling.passes(error):
                    raise
                outcome = _Failure(error, 0.0)
            if isinstance(outcome, bytes) and (trouble := handling.trouble_in(outcome)) is not None:
                outcome = _Failure(trouble, 0.0)
            if isinstance(outcome, bytes):
                self._troubles.over(url)
                return HttpReply(outcome, num_retries)
            wait_s = max(outcome.wait_s, pause_s * random.uniform(0.5, 1.0))
            if time.monotonic() + wait_s > give_up_s:
                error = outcome.error
                if not num_retries:
                    raise error
                text = f"{error} (tried {num_retries + 1} times)"
                raise EndpointError(
                    text,
                    status=error.status,
                    answer=error.answer,
                    num_retries=num_retries,
                    spent=error.spent,
                )
            self._troubles.failed(url, str(outcome.error), wait_s=wait_s)
            try:
                await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                outcome.error.num_retries = num_retries
                handling.on_cut(outcome.error)
                raise
            num_retries += 1
            self._troubles.sent_again()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        session, self._opened = self._opened, None
        if session is not None:
            await session.close()

    async def _attempt(
        self,
        method: str,
        url: str,
        body: bytes | None,
        *,
        headers: Mapping[str, str],
        limits: RequestLimits,
    ) -> bytes | _Failure:
        import aiohttp

        proxy, shown = proxy_for(url), without_passwords(url)
        try:
            async with (
                asyncio.timeout(limits.request_timeout_s),
                self._session().request(
                    method,
                    url,
                    data=body,
                    headers={**headers, **proxy.request_headers},
                    allow_redirects=False,
                    proxy=proxy.url,
                    proxy_headers=proxy.connect_headers,
                    timeout=_connect_timeout(limits.connect_timeout_s),
                ) as reply,
            ):
                content = await reply.read()
        except aiohttp.ConnectionTimeoutError:
            waited = f"no connection within {limits.connect_timeout_s:g} s"
            return _Failure(_unreachable(shown, waited, proxy=proxy.url), 0.0)
        except TimeoutError:
            raise EndpointError(
                f"{shown} did not answer within {limits.request_timeout_s:g} s; "
                "lower max_tokens or the concurrency, or allow more time",
                spent=None,
            ) from None
        except aiohttp.InvalidURL:
            raise EndpointError(
                f"{shown} is not a URL; expected http://host:port/..., an IPv6 address in brackets"
            ) from None
        except aiohttp.ClientSSLError as error:
            raise EndpointError(
                f"{shown} cannot be reached over TLS ({error}); {_advice_on_certificates()}"
            ) from None
        except aiohttp.ClientError as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            reason = str(cause) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError):
                lost = _unreachable(shown, reason, advice_for(cause), proxy=proxy.url)
            else:
                # The line broke after the request was sent.
                what = "did not answer in full"
                advice = "" if proxy.url else "check that the server is still running, and its log"
                advice = advice_for(cause) or advice
                lost = _unreachable(shown, reason, advice, proxy=proxy.url, what=what)
                lost.spent = None
            return _Failure(lost, 0.0)
        if reply.status == 200:
            return content
        if key := headers.get("Authorization", "").removeprefix("Bearer "):
            # Some servers quote the key that they refuse.
            content = content.replace(key.encode(), HIDDEN.encode())
        if is_passing(reply.status):
            wait = reply.headers.get("Retry-After", "")
            return _Failure(_refusal(shown, reply.status, content, wait=wait), _retry_after_s(wait))
        raise _refusal(shown, reply.status, content, moved_to=reply.headers.get("Location", ""))

    def _session(self) -> "aiohttp.ClientSession":
        if self._opened is None:
            import aiohttp

            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened


def is_passing(status: int) -> bool:
    """Return whether a status says that the server is busy or broken: 429, and from 500 on."""
    return status == 429 or status >= 500


def quote(content: bytes) -> str:
    """Return the beginning of `content` on one line, for messages, without terminal controls."""
    head = content[: 4 * _QUOTED_CHARACTERS].decode(errors="replace")
    text = escaped(" ".join(head.split()))
    return text if len(text) <= _QUOTED_CHARACTERS else text[:_QUOTED_CHARACTERS] + "..."


@lru_cache(maxsize=16)
def _connect_timeout(connect_timeout_s: float) -> "aiohttp.ClientTimeout":
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)


class Proxy(NamedTuple):
    """How aiohttp is to send a request: `proxy=url`, `proxy_headers=connect_headers`."""

    url: str | None = None
    request_headers: Mapping[str, str] = {}
    """Headers for the proxy, sent with each plain http request."""
    connect_headers: Mapping[str, str] | None = None
    """Headers for the proxy when it tunnels https; request headers then go to the server."""


def proxy_for(url: str) -> Proxy:
    """Return the proxy for an http or https URL; EndpointError for one that does not speak HTTP.

    No proxy is used for hosts of this machine, which it could not reach, and none for what is no
    URL, which aiohttp refuses.
    """
    try:
        parts = urlsplit(url)
        return _proxy_of(parts.scheme, parts.hostname or "")
    except ValueError:  # half a pair of brackets
        return Proxy()


@lru_cache(maxsize=1024)
def _proxy_of(scheme: str, host: str) -> Proxy:
    """Return the proxy for `host` from the environment variables of this process.

    The result is cached, because looking it up for each request costs more than the request.
    """
    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if proxy is None or is_loopback(host) or proxy_bypass(host):
        return Proxy()
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.scheme not in ("http", "https"):
        raise EndpointError(
            f"the environment variables name a {parts.scheme} proxy for {host}, expected one that "
            f"speaks HTTP; set {scheme}_proxy to such a one, or except the host in no_proxy"
        )
    address = parts.netloc.rpartition("@")[2]
    address = f"{parts.scheme}://{address}"
    if parts.username is None:
        return Proxy(address)
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
    headers = {"Proxy-Authorization": f"Basic {b64encode(login).decode()}"}
    if scheme == "https":
        return Proxy(address, connect_headers=headers)
    return Proxy(address, request_headers=headers)


_ADVICE = {
    # Words of its own, since those of a prompt that does not fit have a meaning.
    400: "the endpoint refuses this request (often for its length, or for a setting unknown there)",
    401: "the API key is missing or was not accepted",
    403: "this API key may not use the model",
    404: "check the base URL (it usually ends in /v1) and the model name",
    407: "the proxy requires a login: put it into the proxy's URL",
    413: "the request is too large for the endpoint: shorten the conversation",
    422: "the endpoint does not accept one of the settings",
    429: "too many requests: lower the concurrency",
}
_FILTERED = re.compile(
    rb'"(?:code|type)"\s*:\s*"'
    rb'(?:content_filter(?:ed)?|content_policy_violation|ResponsibleAIPolicyViolation)"'
)
"""The code in an error of OpenAI's API, and of Azure's, that a content filter caused."""
_NO_TOOL_CALLS = (
    "the endpoint reads no tool calls of this model: set --env.tool_call_format xml, which writes "
    "tools and calls as text, or start its server with a reader of the model's calls"
)


def _refusal(
    url: str, status: int, content: bytes, *, moved_to: str = "", wait: str = ""
) -> EndpointError:
    advice = _ADVICE.get(status, "check the server's log")
    if moved_to:
        base = re.sub(r"/(chat/completions|models)/?([?#].*)?$", "", urljoin(url, moved_to))
        moved_to = foreign(without_passwords(base), _QUOTED_CHARACTERS)
        advice = f"it has moved: use {moved_to} as the base URL"
    if wait:
        waits = foreign(wait, _QUOTED_CHARACTERS)
        advice += f" (the server asked to wait: Retry-After {waits})"
    if status == 400 and b"--enable-auto-tool-choice" in content:
        advice = _NO_TOOL_CALLS
    is_filtered = status == 400 and _FILTERED.search(content) is not None
    if is_filtered:
        advice = "its content filter refused the request or the answer"
    answer = quote(content)
    text = f"{url} answered {status}: {answer or 'nothing'}; {advice}"
    error = EndpointError(text, status=status, answer=answer)
    error.is_filtered = is_filtered
    return error


def _unreachable(
    url: str,
    reason: str,
    advice: str = "",
    *,
    proxy: str | None = None,
    what: str = "cannot be reached",
) -> EndpointError:
    through = ""
    if proxy is not None:
        through = f" through the proxy {proxy}"
        variable = f"{urlsplit(url).scheme}_proxy"
        advice = advice or (
            f"check that the proxy is running ({variable} or all_proxy names it) and reaches the "
            "server, or except the host in no_proxy"
        )
    advice = advice or "check the address and that the server is running"
    return EndpointError(f"{url} {what}{through} ({reason}); {advice}")


def _advice_on_certificates() -> str:
    """Return what to do about a certificate that was not accepted."""
    given = os.environ.get("SSL_CERT_FILE", "")
    if given and not os.access(given, os.R_OK):
        return (
            f"SSL_CERT_FILE is {given!r}, which cannot be read: name a file in PEM format, or "
            "unset the variable"
        )
    return (
        "check its certificate: one of an authority of your own is accepted if SSL_CERT_FILE names "
        "a file in PEM format with the certificate of that authority; or use http:// if the server "
        "does not use TLS"
    )


def _retry_after_s(text: str) -> float:
    """Return the seconds in a Retry-After header, which holds a number or a date."""
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        due = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (due.astimezone(UTC) - datetime.now(UTC)).total_seconds())
