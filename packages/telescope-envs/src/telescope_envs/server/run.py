"""Serve a data folder until SIGTERM, SIGHUP or SIGINT; one server at a time, ends in 2 seconds."""

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from telescope_core.base.addresses import in_url
from telescope_core.base.errors import ConfigError, RegistryError
from telescope_envs.records.files import holder_of, locked_if_free
from telescope_envs.server.app import ServerOptions, create_app
from telescope_envs.server.connections import Connection, Connections
from telescope_envs.server.hub import HubStore

_GRACE_S = 0.5
"""Time for requests in progress at shutdown; a publication that is cut off is not published."""


def serve(
    hub: HubStore,
    options: ServerOptions,
    *,
    port: int,
    started: Callable[[str], None],
) -> None:
    """Serve `hub` on `port` (0 for a free one); calls `started` with the address.

    Raises RegistryError if its database is damaged or served already, ConfigError for a bad name.
    """
    with _only_server(hub.data), _bound(options.host, port) as listening:
        hub.check()
        hub.files.clear_incoming()
        config = configured(hub, options)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = uvicorn.Server(config)
        shown, chosen = listening.getsockname()[:2]
        started(f"http://{in_url(shown)}:{chosen}")
        # uvicorn handles this and SIGINT while it serves, and raises them again once stopped.
        signal.signal(signal.SIGTERM, _end)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, server.handle_exit)
        asyncio.run(server.serve(sockets=[listening]))


def configured(hub: HubStore, options: ServerOptions) -> uvicorn.Config:
    """Return the server configuration of `hub`: its application and the limits on connections."""
    connections = Connections(options.connections, options.proxies)
    app: ASGIApp = create_app(hub, options)
    if options.proxies:
        trusted = [str(proxy) for proxy in options.proxies]
        app = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), trusted))

    def connection(**arguments: Any) -> Connection:
        return Connection(connections, partial(AutoHTTPProtocol, **arguments))

    return uvicorn.Config(
        cast(Any, connections.tracked(app)),
        # Called like a class for each connection.
        http=cast(Any, connection),
        ws="none",
        # Headers of proxies are read above, before the application and after `tracked`.
        proxy_headers=False,
        access_log=False,
        log_config=None,
        server_header=False,
        # Typed as int, but handed to asyncio.wait_for as it is.
        timeout_graceful_shutdown=_GRACE_S,  # pyright: ignore[reportArgumentType]
        timeout_keep_alive=math.ceil(options.connections.request_head_s),
    )


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


@contextmanager
def _only_server(data: Path) -> Generator[None]:
    """Hold the lock of the data folder; it is released however the process ends."""
    with locked_if_free(data / "lock") as is_ours:
        if not is_ours:
            raise RegistryError(
                f"{data} is served by another process ({holder_of(data / 'lock')}); stop it first, "
                "or give another --data"
            )
        yield


@contextmanager
def _bound(host: str, port: int) -> Generator[socket.socket]:
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns off Nagle's algorithm only if the protocol is given. With Nagle's algorithm,
        # the body of a response waits 40 ms for the acknowledgment of its headers.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(128)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {in_url(host)}:{port}: {error.strerror or error}; give another "
            "--host or --port"
        ) from error
    with listening:
        yield listening
