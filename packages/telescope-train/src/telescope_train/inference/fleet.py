"""The inference servers of a run: the Ray actor of each on its node, and the driver's calls to it.

Also their settings, ports and secret.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from telescope_core.base.errors import ConfigError, ProcessDiedError
from telescope_core.records.logs import Logs, log_name, telling_failure
from telescope_core.records.output_logs import INFERENCE
from telescope_train.cluster.network import ANY_ADDRESS, Network
from telescope_train.cluster.nodes import Stages, stages, until_started
from telescope_train.cluster.ports import cannot_listen, listening, listening_from
from telescope_train.cluster.ray_cluster import UnreachableError, answer, is_back
from telescope_train.config.fields import was_set
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerProcess, ServerSettings, Silence
from telescope_train.inference.servers import Loss, Reached, ServerDiedError
from telescope_train.models.served_adapter import served_adapter

_LOGGER = logging.getLogger(__name__)
PROGRESS_S = 120.0
"""Longest time without progress of an actor, if not set; see `inference_progress_timeout_s`."""
_WATCHED_S = 30 * 24 * 3600.0
"""Longest wait for an answer that another check would end earlier."""
WATCHING = "watching"
"""Name of an actor's thread that answers questions about its progress."""
WATCH_EVERY_S = 1.0
"""Seconds between two checks of the actors."""
AT_ITS_NODE = ""
"""Host of a server that is to use the address of its node."""
PLACEMENT_S = 300.0
"""Longest wait for a new actor, unless set; see `ray_placement_timeout_s`."""


class Startup(NamedTuple):
    """The progress of a server's start."""

    is_healthy: bool
    log_bytes: int
    """Size of its log, which grows during the start."""
    reached: Reached
    activity: str
    """What it does before it is healthy."""


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
        return Startup(is_healthy, self._server.log_bytes(), reached, self._server.activity)

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


class ServerGroup:
    """All inference servers of a run."""

    def __init__(
        self,
        servers: Sequence[ServerHandle],
        *,
        silence_s: float,
        progress_s: float,
        placement_s: float = PLACEMENT_S,
    ) -> None:
        """`silence_s`: longest time without output of a server that starts.

        `progress_s`: longest that one that serves may do nothing, or not answer. `placement_s`:
        longest wait for room on another node, when that of a server is gone.
        """
        self.servers = list(servers)
        self._reached = [Reached(server.settings.base_url) for server in servers]
        self.activities = dict[int, str]()
        """What each server that starts is doing, by its number."""
        self._placement_s = placement_s
        self._silence_s = silence_s
        self._progress_s = progress_s

    @classmethod
    def start(
        cls,
        settings: Sequence[ServerSettings],
        places: Sequence[dict[str, Any]],
        ports: ServerPorts,
        config: TrainConfig,
    ) -> "ServerGroup":
        """Start one server per place. Returns at once; `wait_until_healthy` waits for them."""
        servers = [
            ServerHandle.start(
                one, ports, place, progress_s=config.inference.inference_progress_timeout_s
            )
            for one, place in zip(settings, places, strict=True)
        ]
        return cls(
            servers,
            silence_s=config.inference.inference_startup_timeout_s,
            progress_s=config.inference.inference_progress_timeout_s,
            placement_s=config.ray.ray_placement_timeout_s,
        )

    @property
    def reached(self) -> list[Reached]:
        """Addresses and identities of all servers; before they are healthy, the known ones."""
        return list(self._reached)

    async def wait_until_healthy(self, *, num_needed: int) -> dict[int, str]:
        """Return once every server answers its health check or has failed to start.

        Returns why, by the number of each that has failed: one that ends, or writes nothing to its
        log for too long. Raises ProcessDiedError if none of the first `num_needed` is there.
        """
        starting = [self._until_begun(index) for index in range(len(self.servers))]
        outcomes = await asyncio.gather(*starting, return_exceptions=True)
        failed: dict[int, ProcessDiedError] = {}
        for number, outcome in enumerate(outcomes):
            if isinstance(outcome, ProcessDiedError):
                failed[number] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        # All of them have the same settings, which are wrong then.
        if all(number in failed for number in range(num_needed)):
            raise failed[0]
        return {number: str(error) for number, error in failed.items()}

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
        """Return the reason as soon as a server has died or hangs."""
        # Nothing tells the driver about a death: the server is a child of the actor's, not of
        # Ray's. So the actor is asked. If the actor itself is dead, `answer` raises for it.
        server, clock = self.servers[index], asyncio.get_running_loop()
        answered_s = clock.time()
        while True:
            try:
                if await server.ask("check"):
                    answered_s = clock.time()
            except ServerDiedError as error:
                return error.loss
            except ProcessDiedError as error:
                return Loss(str(error))
            # A step may take longer than a question waits, and its tokens are a sign of life too.
            answered_s = max(answered_s, heard_s())
            silent_s = clock.time() - answered_s
            if silent_s > self._progress_s:
                return Loss(
                    f"it hangs: for {silent_s:.0f} s, its engine has neither ended a step nor sent "
                    "a token (limit: inference_progress_timeout_s); its log is "
                    f"{server.settings.log_path}"
                )
            await asyncio.sleep(WATCH_EVERY_S)

    async def start_again(self, index: int) -> Reached:
        """End the rest of a server, and start it; returns its address when it is healthy."""
        server = self.servers[index]
        try:
            await server.ask("start_again")
        except ProcessDiedError as error:
            # The actor is gone, with its node or without. Its watchdog has ended the server.
            with suppress(RayError):
                ray.kill(server.actor)
            # The watchdog may not be through yet, and the server's port not free.
            ports = replace(server.ports, is_port_fixed=False)
            server = ServerHandle.start(
                server.settings, ports, server.place, progress_s=server.progress_s
            )
            self.servers[index] = server
            late = f"the cluster has had no room for {server.name}"
            await self._until_started(server, late, f", since: {error}")
        await self._until_healthy(index)
        return self._reached[index]

    async def end(self, index: int) -> None:
        """End the rest of a server, which frees its memory."""
        server = self.servers[index]
        try:
            await server.ask("close")
        except ProcessDiedError:
            # The actor is gone or does not answer, and its watchdog ends the server after it.
            with suppress(RayError):
                ray.kill(server.actor)

    async def _until_begun(self, index: int) -> None:
        """Return when a server is healthy whose actor has just been started."""
        server = self.servers[index]
        logs = "; what it waits for is in Ray's own logs"
        await self._until_started(server, f"the actor of {server.name} did not start", logs)
        await self._until_healthy(index)

    async def _until_started(self, server: ServerHandle, late: str, more: str) -> None:
        """Return when the actor runs; `late`, `more`: begin and end of the error if it does not."""
        try:
            await server.until_started(self._placement_s)
        except TimeoutError:
            raise ProcessDiedError(
                f"{late}, and the cluster did nothing else for the run for {self._placement_s:g} s "
                f"(limit: ray_placement_timeout_s){more}"
            ) from None

    async def _until_healthy(self, index: int) -> None:
        server = self.servers[index]
        silence = Silence(self._silence_s)
        try:
            while True:
                now: Startup = await server.ask("startup")
                self._reached[index] = now.reached
                self.activities[index] = now.activity
                if now.is_healthy:
                    return
                if silence.is_too_long(now.log_bytes):
                    raise ProcessDiedError(
                        f"inference server at {now.reached.base_url} did not become healthy, and "
                        f"wrote nothing to its log for {self._silence_s:g} s; its log is "
                        f"{server.settings.log_path}. Look there for what it waits for, or raise "
                        "inference_startup_timeout_s"
                    )
                await asyncio.sleep(0.1)
        finally:
            self.activities.pop(index, None)

    async def close(self) -> None:
        """Close all servers; those that are already gone are ignored."""
        # All are told first and then awaited, so that they end at the same time. 30 s cover the
        # longest `close`: a health request of 5 s before it, 5 s of grace, 10 s after SIGKILL.
        closing = [server.actor.close.remote() for server in self.servers]

        async def closed(one: Any) -> None:
            async with asyncio.timeout(30.0):
                await one

        # Errors are dropped: an actor that is gone has no server left to end, and a failed cleanup
        # must not hide the failure that ended the run.
        await asyncio.gather(*(closed(one) for one in closing), return_exceptions=True)


def server_settings(
    config: TrainConfig,
    *,
    device: str,
    dtype: str,
    max_model_len: int,
    log_folder: Path,
    traces_endpoint: str | None = None,
    secret: str = "",
) -> list[ServerSettings]:
    """Return the settings of each server. Ports are consecutive; each has a log file of its own.

    `max_model_len`: tokens of prompt and answer together. `traces_endpoint`: where they send their
    traces; None = they keep none. `secret`: what has to be shown, here and there; empty = nothing.
    """
    inference, model = config.inference, config.model
    host = LOOPBACK if config.ray.ray_address is None else AT_ITS_NODE
    return [
        ServerSettings(
            model_path=model.model,
            host=inference.inference_host or host,
            secret=secret,
            port=inference.inference_base_port + index,
            log_path=log_folder / log_name(INFERENCE, str(index)),
            number=index,
            device=device,
            num_threads=max(1, int(config.ray.ray_inference_cpus_per_worker)),
            dtype=dtype,
            max_model_len=max_model_len,
            tensor_parallel_size=inference.inference_tensor_parallel_size,
            data_parallel_size=inference.inference_data_parallel_size,
            max_num_seqs=inference.max_num_seqs,
            scheduling_policy=inference.vllm_scheduling_policy,
            gpu_memory_utilization=inference.gpu_memory_utilization,
            takes_weights=True,
            sleeps=inference.colocate is True,
            trust_remote_code=model.trust_remote_code,
            fp32_lm_head=model.fp32_lm_head,
            quantization=inference.inference_quantization,
            traces_endpoint=traces_endpoint,
            run=config.run.name,
            traces_secret=secret,
            returns_routes=config.trainer.routing_replay,
            adapter=served_adapter(config),
            more_arguments=inference.vllm_arguments,
        )
        for index in range(inference.inference_num_workers)
    ]
