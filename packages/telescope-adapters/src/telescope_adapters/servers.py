"""Environments that a server of another framework plays: `SCHEME:URL`.

Their adapters share: the address, one connection pool, requests whose errors are failures of the
server, and a check of the served environment. The messages of a rollout differ between them.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal, TypeVar, cast

import aiohttp

from telescope_adapters.settings import AdaptedConfig, AdaptedEnvironment
from telescope_core.base.errors import (
    ConfigError,
    EndpointError,
    EnvironmentLoadError,
    TelescopeError,
    UnplayableError,
)
from telescope_core.base.messages import json_object, message_from_json
from telescope_core.base.types import Message, ToolCall
from telescope_core.chat.http import proxy_for

_LIMITS = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=600.0)
"""A server may work for minutes on one request; the deadline of the rollout is the real limit."""
_FIRST_ANSWER_S = 10.0
_IDLE_S = 2.0
"""Less than any server waits, so that none closes a connection while a request is on its way."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Before each further attempt to begin a session; a server that is restarted needs some seconds."""
Begun = TypeVar("Begun")


_OF_CODE = (400, 413, 422, 500)
"""Statuses with which a server refuses what it was sent, or tells that its code raised at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one request."""

    url: str
    status: int
    text: str
    headers: Mapping[str, str]
    cookies: Mapping[str, str]

    def json(self) -> Any:
        """Return what it holds; raises EndpointError for an error, or for what is no JSON."""
        if self.status >= 400:
            text = f"{self.url} answered {self.status}: {self.text:.1000}"
            raise code_raised(text) if self.status in _OF_CODE else EndpointError(text)
        try:
            return json.loads(self.text)
        except json.JSONDecodeError as error:
            raise EndpointError(
                f"{self.url} answered no JSON ({error}): {self.text:.200}"
            ) from None

    def field(self, name: str) -> Any:
        """Return one field of the object it holds; raises EndpointError if there is none."""
        if name not in (found := as_fields(self.json())):
            raise EndpointError(f"{self.url} answered no object with {name}: {self.text:.200}")
        return found[name]


def code_raised(text: str) -> EndpointError:
    """Return the error with message `text` for code of a server that raised at what it was asked.

    It may depend on what the policy said, so it is final.
    """
    error = EndpointError(text)
    error.is_of_code = True
    return error


async def ask(
    session: aiohttp.ClientSession,
    method: Literal["GET", "POST"],
    url: str,
    *,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    cookies: Mapping[str, str] | None = None,
) -> Answer:
    """Return the answer of a server, whatever its status; raises EndpointError for none."""
    proxy = proxy_for(url)
    try:
        async with session.request(
            method,
            url,
            json=body,
            headers={**(headers or {}), **proxy.request_headers},
            cookies=cookies,
            proxy=proxy.url,
            proxy_headers=proxy.connect_headers,
        ) as answer:
            return Answer(
                url=url,
                status=answer.status,
                text=await answer.text(),
                headers=answer.headers,
                cookies={name: one.value for name, one in answer.cookies.items()},
            )
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise EndpointError(f"{url} does not answer: {why}; is its server running?") from error
    except UnicodeDecodeError as error:
        raise EndpointError(f"{url} answered what is no text: {error}") from error


async def once_up(begin: Callable[[], Awaitable[Begun]]) -> Begun:
    """Return what `begin` returns, which is tried again for a while if nothing takes connections.

    For the first request of a session: of a session that has begun, a restart left nothing.
    """
    for pause_s in _PAUSES_S:
        try:
            return await begin()
        except EndpointError as error:
            away = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError)
            if not isinstance(error.__cause__, away):
                raise
        await asyncio.sleep(pause_s)
    return await begin()


def as_fields(value: object) -> dict[str, Any]:
    """Return an object of JSON; empty for anything else."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def sendable(fields: Mapping[str, Any]) -> Message:
    """Return a message in the form of the chat API; UnplayableError for what no endpoint takes."""
    try:
        return message_from_json(fields)
    except ValueError as error:
        raise UnplayableError(f"what the server shows the policy cannot be sent: {error}") from None


def arguments_of(call: ToolCall) -> dict[str, Any] | None:
    """Return the arguments of a call by name; None if they are no JSON object."""
    return json_object(call.arguments or "{}")


def new_session() -> aiohttp.ClientSession:
    """Return connections for any number of rollouts, which share no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=_LIMITS,
    )


class ServedEnvironment(AdaptedEnvironment):
    """An environment that a server plays; its id is the address."""

    network: Literal["none", "load", "always"] = "always"
    scheme: ClassVar[str] = ""
    """The part of its names before the colon."""

    def __init__(self, config: AdaptedConfig | None = None) -> None:
        super().__init__(config)
        self.url = str(self.config.id).rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise EnvironmentLoadError(
                f"expected {self.scheme}:URL with the http or https address of a server, such as "
                f"{self.scheme}:http://127.0.0.1:8000, got {self.url!r}"
            )
        if self.config.options:
            raise ConfigError(
                f"env.options are arguments with which an environment is made, and the server at "
                f"{self.url} made its own; leave them out, got {self.config.options!r:.200}"
            )
        self._session: aiohttp.ClientSession | None = None
        self._look: asyncio.Task[Any] | None = None

    async def look(self) -> Any:
        """Return what the adapter must know of the server; raises if the server cannot play."""
        raise EnvironmentLoadError(f"{type(self).__name__} must define look(self)")

    async def looked(self) -> Any:
        """Return what `look` found, which the first rollout asks for all."""
        if self._look is None:
            self._look = asyncio.create_task(self.look())
        try:
            return await asyncio.shield(self._look)
        except EndpointError:
            self._look = None  # the next rollout asks again
            raise

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections, made on first use."""
        if self._session is None:
            self._session = new_session()
            self.on_close(self._session.close)
        return self._session


async def why_silent(factory: str, settings: Mapping[str, Any]) -> str:
    """Return why the server of an environment of these settings cannot play now; empty if it can.

    `factory` is `module:Class`, as of a `Framework`.
    """
    module, _, name = factory.partition(":")
    kind: type[ServedEnvironment] = getattr(import_module(module), name)
    made = kind.from_settings(settings)
    assert isinstance(made, ServedEnvironment), "from_settings builds its own class"
    try:
        async with asyncio.timeout(_FIRST_ANSWER_S):
            await made.look()
    except TimeoutError:
        return f"{made.url} says nothing within {_FIRST_ANSWER_S:g} s"
    except TelescopeError as error:
        return str(error)
    finally:
        await made.close()
    return ""
