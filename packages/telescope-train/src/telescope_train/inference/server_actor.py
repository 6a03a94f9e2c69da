"""One inference server: the Ray actor that runs it on its node, and the driver's calls to it."""

import logging
import os
import socket
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from telescope_core.base.errors import ConfigError, ProcessDiedError
from telescope_core.records.logs import Logs, telling_failure
from telescope_train.cluster.network import ANY_ADDRESS, Network
from telescope_train.cluster.nodes import Stages, stages, until_started
from telescope_train.cluster.ports import cannot_listen, listening, listening_from
from telescope_train.cluster.ray_cluster import UnreachableError, answer, is_back
from telescope_train.config.fields import was_set
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerProcess, ServerSettings
from telescope_train.inference.servers import Reached

_LOGGER = logging.getLogger(__name__)
PROGRESS_S = 120.0
"""Longest time without progress of an actor, if not set; see `inference_progress_timeout_s`."""
_WATCHED_S = 30 * 24 * 3600.0
"""Longest wait for an answer that another check would end earlier."""
WATCHING = "watching"
"""Name of an actor's thread that answers questions about its progress."""


class Startup(NamedTuple):
    """The progress of a server's start."""

    is_healthy: bool
    log_bytes: int
    """Size of its log, which grows during the start."""
    reached: Reached


# The server is a child of an actor and not of the driver: Ray places actors on any node, and ends
# them when the driver is gone. The server's watchdog then ends the server.
# Ray runs the calls of this actor one at a time, so `close` waits behind a `check` that is under
# way, for at most the 5 s in which it waits for a sign of life.
class ServerActor:
    """Runs on the server's node: starts the server, watches it and ends it."""

    def __init__(self, settings: ServerSettings, ports: "ServerPorts") -> None:
        self._ports, settings = ports, ports.settled(settings)
        self._failed: ConfigError | None = None
        listener: socket.socket | None = None
        try:
            listener = ports.listener(settings)
            settings = replace(settings, port=listener.getsockname()[1])
        except ConfigError as error:
            # An actor whose constructor raises is dead, and the class of the error is lost.
            self._failed = error
        folder = settings.log_path.parent
        # Another machine than the driver's may not have it yet.
        folder.mkdir(parents=True, exist_ok=True)
        self._log = Logs(folder=folder).begin("server", settings.base_url)
        self._is_healthy = False
        self._num_done = 0
        if listener is not None:
            self._start(settings, listener)

    # In a thread of its own, so that it answers while another call waits.
    @ray.method(concurrency_group=WATCHING)
    def signs_of_life(self) -> int:
        """Return a number that grows with the actor's work and its server's output."""
        return self._num_done + (0 if self._failed else self._server.log_bytes())

    def _start(self, settings: ServerSettings, listener: socket.socket) -> None:
        with telling_failure(_LOGGER, "starting the server"):
            self._server = ServerProcess(settings, listener)
        self._num_done += 1
        _LOGGER.info(
            "server %s started at %s as process %d; its output: %s",
            self._server.identity,
            self._server.settings.base_url,
            self.pid(),
            settings.log_path,
        )

    def pid(self) -> int:
        """Return the process id of the server."""
        return self._server.pid

    def startup(self) -> Startup:
        """Return the progress of the server's start.

        Raises ProcessDiedError if it has ended, and ConfigError if it cannot be started.
        """
        if self._failed is not None:
            raise self._failed
        with telling_failure(_LOGGER, "the start of the server"):
            is_healthy = self._server.is_healthy()
        if is_healthy and not self._is_healthy:
            _LOGGER.info("server answers its health check")
        self._is_healthy = is_healthy
        reached = Reached(self._server.settings.base_url, self._server.identity)
        return Startup(is_healthy, self._server.log_bytes(), reached)

    def check(self) -> bool:
        """Return whether the engine shows a sign of life; raises ProcessDiedError if it ended."""
        with telling_failure(_LOGGER, "the check of the server"):
            self._server.check()
            return self._server.check_engine()

    def start_again(self) -> None:
        """End the rest of the server, and start it.

        If another process took its port meanwhile, the server takes a later one.
        """
        # The new log begins empty, so what was printed counts as done.
        printed = self._server.log_bytes()
        self._server.close()
        self._num_done += printed + 1
        self._log.next_life()
        self._is_healthy = False
        settings = self._server.settings
        self._start(settings, self._ports.listener_again(settings))

    def close(self) -> None:
        """End the server."""
        if self._failed is None:
            self._server.close()
            _LOGGER.info("server ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPorts:
    """Chooses a server's address on its node."""

    network: Network
    num_servers: int = 1
    """Number of servers of the run, whose ports are adjacent."""
    is_port_fixed: bool = True
    """Whether it must use the port in its settings; if not, a later one replaces a taken one."""

    @classmethod
    def from_config(cls, config: TrainConfig, network: Network) -> "ServerPorts":
        """Return the ports for the servers of a run."""
        section = config.inference
        return cls(
            network=network,
            num_servers=section.inference_num_workers,
            is_port_fixed=was_set(section, "inference_base_port"),
        )

    def settled(self, settings: ServerSettings) -> ServerSettings:
        """Return `settings` with the address on this node."""
        own = self.network.address()
        host = settings.host or own
        return replace(
            settings,
            host=host,
            reached_at=own if host in ANY_ADDRESS else None,
            variables={
                **self.network.variables(os.environ),
                **self.network.reached_directly(os.environ),
            },
        )

    def listener(self, settings: ServerSettings) -> socket.socket:
        """Return the socket of a server that starts; raises ConfigError if no port is free."""
        if not self.is_port_fixed:
            return listening_from(settings.host, settings.port, every=self.num_servers)
        try:
            return listening(settings.host, settings.port)
        except OSError as error:
            raise cannot_listen(settings.host, settings.port, error) from None

    def listener_again(self, settings: ServerSettings) -> socket.socket:
        """Return a socket with the port of `settings`, or a later one."""
        return replace(self, is_port_fixed=False).listener(settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandle:
    """The driver's view of one server."""

    settings: ServerSettings
    ports: ServerPorts
    place: dict[str, Any]
    """Ray's options for the place of the actor."""
    actor: Any
    """Ray's handle of the server's `ServerActor`."""
    progress_s: float = PROGRESS_S
    """Longest time in seconds that the actor may be stuck during a call."""
    look: Stages = stages
    """A value that changes while the cluster starts processes."""

    @classmethod
    def start(
        cls,
        settings: ServerSettings,
        ports: ServerPorts,
        place: dict[str, Any],
        *,
        progress_s: float = PROGRESS_S,
    ) -> "ServerHandle":
        """Start the server. Returns at once."""
        actor_class: Any = ray.remote(concurrency_groups={WATCHING: 1})(ServerActor)
        actor = actor_class.options(**place).remote(settings, ports)
        return cls(settings=settings, ports=ports, place=place, actor=actor, progress_s=progress_s)

    @property
    def name(self) -> str:
        """Its name before its address is known."""
        return f"inference server {self.settings.number}"

    async def until_started(self, silence_s: float) -> None:
        """Return when the actor runs.

        Raises TimeoutError after `silence_s` seconds in which the cluster did nothing for the run.
        """
        ready = self._answer("__ray_ready__", timeout_s=_WATCHED_S)
        await until_started(ready, silence_s=silence_s, look=self.look)

    async def ask(self, question: str) -> Any:
        """Return the result of the actor's method `question`; it must have started.

        It may take any time for it as long as it moves on.
        """
        while True:
            try:
                return await self._answer(question, timeout_s=self.progress_s)
            except UnreachableError:
                # Nothing is wrong with asking anything twice, once it can be reached again.
                if not await is_back(self.actor.signs_of_life.remote):
                    raise

    async def signs_of_life(self) -> int:
        """Return a number that grows while the actor makes progress."""
        return await self.actor.signs_of_life.remote()

    async def _answer(self, question: str, *, timeout_s: float) -> Any:
        process = f"the actor of {self.name}"
        try:
            return await answer(
                getattr(self.actor, question).remote(),
                process=process,
                watched=self,
                timeout_s=timeout_s,
                limit="inference_progress_timeout_s",
            )
        except RayError as error:
            # Any failure of Ray, such as to start a process, costs only this server.
            raise ProcessDiedError(f"{process} failed: {error}") from None
