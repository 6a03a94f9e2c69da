"""Environment workers on other nodes: an actor beside each forwards its bytes.

    pool in the driver  <-- TCP, after a secret -->  WorkerRelay (actor)  <-- socket -->  worker

The worker is started as on the driver's machine, with its own interpreter, limits and log, and the
frames are the same. When the actor ends, for any reason, the worker's supervisor ends it.
"""

import asyncio
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import ray
from ray.exceptions import RayError, RayTaskError

from telescope_core.base.errors import EnvironmentProcessError, TelescopeError
from telescope_core.finding.locate import locate_environment
from telescope_core.open import local_place
from telescope_core.processes.launch import Lifeline
from telescope_train.cluster.environment_places import WorkerOrder
from telescope_train.cluster.network import Network
from telescope_train.cluster.nodes import Stages, stages, until_started
from telescope_train.cluster.ray_cluster import result_of

_LOGGER = logging.getLogger(__name__)
_CHUNK_BYTES = 2**18
_CONNECT_S = 20.0
"""Longest wait in seconds for a connection to a relay, and for the secret that must begin it."""
_EPITAPH_S = 3.0


class Listening(NamedTuple):
    """The address at which a relay waits for the driver."""

    host: str
    port: int
    machine: str
    """The name of its machine."""


class WorkerRelay:
    """An actor on a node: starts a worker when the driver connects, and forwards its bytes."""

    def __init__(self, order: WorkerOrder, own_variables: Sequence[str], network: Network) -> None:
        """`own_variables`: names of this node's variables for the worker, such as its secrets."""
        self._order = order
        self._own_variables = tuple(own_variables)
        self._network = network
        self._ended = asyncio.Event()
        self._worker: Lifeline | None = None
        self._trouble = ""
        self._is_taken = False

    async def listen(self, secret: str) -> Listening:
        """Wait for one connection that begins with `secret`; returns at once.

        Raises a TelescopeError if this node does not have the environment.
        """
        order = self._order
        location = locate_environment(order.environment)
        place = local_place(order.environment, location, order.processes, order.index)
        self._place = replace(place, own_variables=self._own_variables)
        self._secret = secret.encode()
        # The worker inherits these variables: its programs speak to the driver's gateway directly.
        os.environ.update(self._network.reached_directly(os.environ))
        host = self._network.address()
        self._server = await asyncio.start_server(self._take, host, 0)
        return Listening(host, self._server.sockets[0].getsockname()[1], socket.gethostname())

    async def until_ended(self) -> None:
        """Return when the worker or the driver has ended."""
        await self._ended.wait()

    async def epitaph(self) -> str:
        """Return how the worker ended and its last output."""
        return self._trouble or ("" if self._worker is None else await self._worker.epitaph())

    async def _take(self, host: asyncio.StreamReader, to_host: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                given = await host.readexactly(len(self._secret))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            given = b""
        if self._is_taken or not hmac.compare_digest(given, self._secret):
            to_host.close()
            return
        self._is_taken = True
        self._server.close()
        try:
            await self._serve(host, to_host)
        except (EnvironmentProcessError, ConnectionError) as error:
            self._trouble = str(error)
        finally:
            to_host.close()
            self._ended.set()

    async def _serve(self, host: asyncio.StreamReader, to_host: asyncio.StreamWriter) -> None:
        worker = asyncio.StreamReader()
        protocol = _WorkerEnd(worker)
        silence_s = self._order.processes.deadlines.start_s
        self._worker = await self._place.start(protocol, silence_s=silence_s)
        assert protocol.transport is not None, "a started worker is connected"
        loop = asyncio.get_running_loop()
        to_worker = asyncio.StreamWriter(protocol.transport, protocol, worker, loop)
        pumps = [
            asyncio.create_task(_pump(host, to_worker)),
            asyncio.create_task(_pump(worker, to_host)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            to_worker.close()
            # Whichever side has gone, the worker is no longer needed.
            self._worker.kill()


class _WorkerEnd(asyncio.StreamReaderProtocol):
    """The connection to the worker; keeps its transport."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        super().__init__(reader)
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Not asked for its class: actors run on uvloop where that is installed, whose transports
        # are not of asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    # Bytes are only read if the other side takes them, so memory stays bounded.
    with suppress(ConnectionError):
        while content := await source.read(_CHUNK_BYTES):
            target.write(content)
            await target.drain()


class RayLauncher:
    """Starts workers on the resources that are reserved for them."""

    def __init__(
        self,
        places: Sequence[Mapping[str, Any]],
        network: Network,
        secret_names: Mapping[str, Sequence[str]],
        *,
        look: Stages = stages,
    ) -> None:
        """`places`: Ray's options for each worker.

        `secret_names`: the variables that an environment declares as its secrets, by its name.
        `look`: what shows that the cluster starts processes.
        """
        self._places = places
        self._network = network
        self._secret_names = secret_names
        self._look = look

    async def launch(
        self, order: WorkerOrder, protocol: asyncio.Protocol, *, silence_s: float
    ) -> Lifeline:
        """Start a worker and connect `protocol` to it."""
        names = self._secret_names.get(order.environment, ())
        actor_class: Any = ray.remote(WorkerRelay)
        actor = actor_class.options(**self._places[order.number]).remote(
            order, names, self._network
        )
        secret = secrets.token_hex(32)
        try:
            listens: Coroutine[Any, Any, Listening] = result_of(actor.listen.remote(secret))
            listening = await until_started(listens, silence_s=silence_s, look=self._look)
            transport = await _connected(listening, secret, protocol)
        except BaseException as error:
            _kill(actor)
            if isinstance(error, RayTaskError) and isinstance(error.cause, TelescopeError):
                # Another attempt would not find it either.
                raise type(error.cause)(f"on the nodes of the cluster: {error.cause}") from None
            if isinstance(error, RayError | OSError):
                raise EnvironmentProcessError(
                    f"{order.label} cannot be started on the cluster: {error}"
                ) from error
            raise
        where = f"{listening.machine} ({listening.host})"
        _LOGGER.info("%s runs on %s", order.label, where)
        return ClusterWorker(actor, transport, where)


class ClusterWorker:
    """A worker on a node of the cluster."""

    def __init__(self, actor: Any, transport: asyncio.Transport, node: str) -> None:
        self._actor = actor
        self._transport = transport
        self._node = node
        self._watch = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        # A node that is cut off sends nothing, not even that it is gone: Ray notices first.
        try:
            await self._actor.until_ended.remote()
        except RayError:
            self._transport.abort()

    async def end(self, *, within_s: float) -> None:
        """Wait up to `within_s` seconds for the worker to end, then end it by force. Idempotent."""
        await asyncio.wait([self._watch], timeout=within_s)
        self._watch.cancel()
        self.kill()
        _kill(self._actor)

    def kill(self) -> None:
        """End the worker and everything it started now."""
        # The relay sees it and ends the worker; it lives on to say how that ended.
        self._transport.abort()

    def hide(self, values: Iterable[str]) -> None:
        """Do nothing: its secrets are on its node, which removes them from its output."""

    async def epitaph(self) -> str:
        """Return how the worker ended and its last output, for an error message."""
        try:
            async with asyncio.timeout(_EPITAPH_S):
                return f"on node {self._node}: {await self._actor.epitaph.remote()}"
        except (RayError, TimeoutError):
            return f"its node {self._node} is gone"


async def _connected(
    listening: Listening, secret: str, protocol: asyncio.Protocol
) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    address = (listening.host, listening.port)
    sock = socket.socket(socket.AF_INET6 if ":" in listening.host else socket.AF_INET)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(_CONNECT_S):
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, secret.encode())
        transport, _ = await loop.create_connection(lambda: protocol, sock=sock)
    except BaseException as error:
        sock.close()
        if isinstance(error, TimeoutError) and not error.args:
            raise OSError(f"no connection to {address} in {_CONNECT_S:g} s") from None
        raise
    return transport


def _kill(actor: Any) -> None:
    with suppress(RayError):
        ray.kill(actor)
