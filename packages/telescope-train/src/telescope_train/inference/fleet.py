"""The inference servers of a run. A Ray actor on each server's node starts it and watches it."""

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from telescope_core.errors import ConfigError, ProcessDiedError
from telescope_core.records.logs import Logs, log_name, telling_failure
from telescope_core.records.output_logs import INFERENCE
from telescope_train.cluster.network import ANY_ADDRESS, Network, is_loopback
from telescope_train.cluster.ports import first_free_port
from telescope_train.cluster.ray_cluster import answer
from telescope_train.config.fields import was_set
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerProcess, ServerSettings, Silence
from telescope_train.inference.wire import SECRET_VARIABLE
from telescope_train.models.served_adapter import served_adapter

_LOGGER = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
"""Seconds between two rounds of questions to the keepers."""
SHORTEST_SECRET = 16
AT_ITS_NODE = ""
"""Host of a server that takes the address of the node that it comes to."""
KEEPER_DEADLINE_S = 600.0
"""Longest that a keeper may take for an answer, its own start included, in seconds."""


class Startup(NamedTuple):
    """How far a server is."""

    is_healthy: bool
    log_bytes: int
    """Size of its log, which grows while it does something."""
    base_url: str = ""
    """Where it listens; empty = where it was told to."""


# The server is a child of an actor and not of the driver: Ray places actors on any node, and ends
# them when the driver is gone. The server's watchdog then ends the server.
# Ray runs the calls of this actor one at a time, so `close` waits behind a `check` that is under
# way, for at most the 5 s in which it waits for a sign of life.
class ServerKeeper:
    """Runs on the server's node: starts the server, watches it and ends it."""

    def __init__(self, settings: ServerSettings, seat: "ServerSeat") -> None:
        settings = seat.settled(settings)
        folder = settings.log_path.parent
        # Another machine than the driver's may not have it yet.
        folder.mkdir(parents=True, exist_ok=True)
        self._log = Logs(folder=folder).begin("server", settings.base_url)
        self._is_healthy = False
        self._start(settings)

    def _start(self, settings: ServerSettings) -> None:
        with telling_failure(_LOGGER, "starting the server"):
            self._server = ServerProcess(settings)
        _LOGGER.info("server started as process %d; its output: %s", self.pid(), settings.log_path)

    def pid(self) -> int:
        """Return the process id of the server."""
        return self._server.pid

    def startup(self) -> Startup:
        """Return how far the server is; raises ProcessDiedError if it has ended."""
        with telling_failure(_LOGGER, "the start of the server"):
            is_healthy = self._server.is_healthy()
        if is_healthy and not self._is_healthy:
            _LOGGER.info("server answers its health check")
        self._is_healthy = is_healthy
        return Startup(is_healthy, self._server.log_bytes(), self._server.settings.base_url)

    def check(self) -> bool:
        """Return whether the engine gives a sign of life; raises ProcessDiedError if it ended."""
        with telling_failure(_LOGGER, "the check of the server"):
            self._server.check()
            return self._server.check_engine()

    def start_again(self) -> None:
        """End what is left of the server, and start it."""
        self._server.close()
        self._log.next_life()
        self._is_healthy = False
        self._start(self._server.settings)

    def close(self) -> None:
        """End the server."""
        self._server.close()
        _LOGGER.info("server ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeat:
    """How a server finds its address on the node that it has come to."""

    network: Network
    num_servers: int = 1
    """Of the run, whose ports are next to each other."""
    is_port_fixed: bool = True
    """Whether it must listen at the port of its settings, or takes a later one if that is taken."""

    @classmethod
    def of(cls, config: TrainConfig, network: Network) -> "ServerSeat":
        """Return that of the servers of a run."""
        section = config.inference
        return cls(
            network=network,
            num_servers=section.inference_num_workers,
            # On other machines nobody could look beforehand which ports are free.
            is_port_fixed=network.is_local or was_set(section, "inference_base_port"),
        )

    def settled(self, settings: ServerSettings) -> ServerSettings:
        """Return `settings` with the address on this node; raises ConfigError if there is none."""
        own = self.network.address()
        host = settings.host or own
        port = settings.port
        if not self.is_port_fixed:
            port = first_free_port(host, port, every=self.num_servers)
        return replace(
            settings,
            host=host,
            reached_at=own if host in ANY_ADDRESS else None,
            port=port,
            # Others on this machine are as trusted as the run's own files.
            secret="" if is_loopback(host) else settings.secret,
            variables=self.network.variables(os.environ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandle:
    """One server, as the driver sees it."""

    settings: ServerSettings
    seat: ServerSeat
    place: dict[str, Any]
    """Where Ray puts the keeper."""
    keeper: Any
    """Ray's handle of the server's `ServerKeeper`."""

    @classmethod
    def start(
        cls, settings: ServerSettings, seat: ServerSeat, place: dict[str, Any]
    ) -> "ServerHandle":
        """Start the server. Returns at once."""
        keeper = ray.remote(ServerKeeper).options(**place).remote(settings, seat)
        return cls(settings=settings, seat=seat, place=place, keeper=keeper)

    @property
    def name(self) -> str:
        """What it is called before anybody knows where it is."""
        return f"inference server {self.settings.number}"

    async def ask(self, question: str) -> Any:
        """Return the answer of the keeper's method `question`."""
        process = f"the keeper of {self.name}"
        reference = getattr(self.keeper, question).remote()
        try:
            return await answer(reference, process=process, timeout_s=KEEPER_DEADLINE_S)
        except RayError as error:
            # Whatever it could not do, such as to start a process: one server is lost, no more.
            raise ProcessDiedError(f"{process} failed: {error}") from None


class ServerGroup:
    """All inference servers of a run."""

    def __init__(
        self,
        servers: Sequence[ServerHandle],
        *,
        silence_s: float,
        progress_s: float,
        placement_s: float = KEEPER_DEADLINE_S,
    ) -> None:
        """`silence_s`: longest that a server that starts may write nothing to its log.

        `progress_s`: longest that one that serves may do nothing, or not answer. `placement_s`:
        longest wait for room on another node, when that of a server is gone.
        """
        self.servers = list(servers)
        self._base_urls = [server.settings.base_url for server in servers]
        self._placement_s = placement_s
        self._silence_s = silence_s
        self._progress_s = progress_s

    @classmethod
    def start(
        cls,
        settings: Sequence[ServerSettings],
        places: Sequence[dict[str, Any]],
        seat: ServerSeat,
        config: TrainConfig,
    ) -> "ServerGroup":
        """Start one server per place. Returns at once; `wait_until_healthy` waits for them."""
        servers = [
            ServerHandle.start(one, seat, place)
            for one, place in zip(settings, places, strict=True)
        ]
        return cls(
            servers,
            silence_s=config.inference.inference_startup_timeout_s,
            progress_s=config.inference.inference_progress_timeout_s,
            placement_s=config.ray.ray_placement_timeout_s,
        )

    @property
    def base_urls(self) -> list[str]:
        """Addresses of all servers, once they are healthy; of others what is known of it."""
        return list(self._base_urls)

    async def wait_until_healthy(self, *, num_needed: int) -> dict[int, str]:
        """Return once every server answers its health check or has failed to start.

        Returns why, by the number of each that has failed: one that ends, or writes nothing to its
        log for too long. Raises ProcessDiedError if none of the first `num_needed` is there.
        """
        starting = [self._until_healthy(index) for index in range(len(self.servers))]
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

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> str:
        """Return why a server has died or hangs, as soon as it does."""
        # Nothing tells the driver about a death: the server is a child of the keeper's, not of
        # Ray's. So the keeper is asked. If the keeper itself is dead, `answer` raises for it.
        server, clock = self.servers[index], asyncio.get_running_loop()
        answered_s = clock.time()
        while True:
            try:
                if await server.ask("check"):
                    answered_s = clock.time()
            except ProcessDiedError as error:
                return str(error)
            # A step may take longer than a question waits, and its tokens are a sign of life too.
            answered_s = max(answered_s, heard_s())
            silent_s = clock.time() - answered_s
            if silent_s > self._progress_s:
                return (
                    f"it hangs: for {silent_s:.0f} s, its engine has neither ended a step nor sent "
                    "a token (limit: inference_progress_timeout_s); its log is "
                    f"{server.settings.log_path}"
                )
            await asyncio.sleep(WATCH_EVERY_S)

    async def start_again(self, index: int) -> str:
        """End what is left of a server, and start it; returns its address when it is healthy."""
        server = self.servers[index]
        try:
            await server.ask("start_again")
        except ProcessDiedError as error:
            # The keeper is gone, with its node or without. Its watchdog has ended the server.
            with suppress(RayError):
                ray.kill(server.keeper)
            server = ServerHandle.start(server.settings, server.seat, server.place)
            self.servers[index] = server
            await self._until_placed(server, error)
        await self._until_healthy(index)
        return self._base_urls[index]

    async def _until_placed(self, server: ServerHandle, gone: ProcessDiedError) -> None:
        """Return when a new keeper runs; `gone` is why there is no old one any more."""
        try:
            async with asyncio.timeout(self._placement_s):
                await server.keeper.__ray_ready__.remote()
        except TimeoutError:
            raise ProcessDiedError(
                f"the cluster has had no room for {server.name} for {self._placement_s:g} s "
                f"(limit: ray_placement_timeout_s), since: {gone}"
            ) from None
        except RayError as error:
            raise ProcessDiedError(f"{server.name} cannot be placed: {error}") from None

    async def _until_healthy(self, index: int) -> None:
        server = self.servers[index]
        silence = Silence(self._silence_s)
        while True:
            now: Startup = await server.ask("startup")
            self._base_urls[index] = now.base_url or self._base_urls[index]
            if now.is_healthy:
                return
            if silence.is_too_long(now.log_bytes):
                raise ProcessDiedError(
                    f"inference server at {self._base_urls[index]} did not become healthy, and "
                    f"wrote nothing to its log for {self._silence_s:g} s; its log is "
                    f"{server.settings.log_path}. Look there for what it waits for, or raise "
                    "inference_startup_timeout_s"
                )
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End all servers, and ignore those that are already gone."""
        # All are told first and then awaited, so that they end at the same time. 30 s cover the
        # longest `close`: a health request of 5 s before it, 5 s of grace, 10 s after SIGKILL.
        closing = [server.keeper.close.remote() for server in self.servers]

        async def closed(one: Any) -> None:
            async with asyncio.timeout(30.0):
                await one

        # Errors are dropped: a keeper that is gone has no server left to end, and a failed cleanup
        # must not hide the failure that ended the run.
        await asyncio.gather(*(closed(one) for one in closing), return_exceptions=True)


class Secrets(NamedTuple):
    """What is asked for where others can reach it; empty = nothing."""

    servers: str = ""
    """By servers whose address is that of their node."""
    traces: str = ""
    """By who receives their traces."""


NO_SECRETS = Secrets()


def server_secret(environ: Mapping[str, str]) -> str:
    """Return what the servers of a run ask for: a new secret, or the one that was chosen for it.

    Raises ConfigError for one that could be guessed.
    """
    chosen = environ.get(SECRET_VARIABLE, "")
    if chosen and len(chosen) < SHORTEST_SECRET:
        raise ConfigError(
            f"{SECRET_VARIABLE} must hold at least {SHORTEST_SECRET} characters, got "
            f"{len(chosen)}; leave it out for a new secret with each run"
        )
    return chosen or secrets.token_urlsafe(32)


def server_settings(
    config: TrainConfig,
    *,
    device: str,
    dtype: str,
    max_model_len: int,
    log_folder: Path,
    traces_endpoint: str | None = None,
    asks_for: Secrets = NO_SECRETS,
) -> list[ServerSettings]:
    """Return the settings of each server. Ports are consecutive; each has a log file of its own.

    `max_model_len`: tokens of prompt and answer together. `traces_endpoint`: where they send their
    traces; None = they keep none. `asks_for`: what has to be shown, here and there.
    """
    inference, model = config.inference, config.model
    host = LOOPBACK if config.ray.ray_address is None else AT_ITS_NODE
    return [
        ServerSettings(
            model_path=model.model,
            host=inference.inference_host or host,
            secret=asks_for.servers,
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
            max_num_batched_tokens=inference.max_num_batched_tokens,
            scheduling_policy=inference.vllm_scheduling_policy,
            gpu_memory_utilization=inference.gpu_memory_utilization,
            takes_weights=True,
            sleeps=inference.colocate,
            trust_remote_code=model.trust_remote_code,
            fp32_lm_head=model.fp32_lm_head,
            traces_endpoint=traces_endpoint,
            traces_secret=asks_for.traces,
            adapter=served_adapter(config),
            more_arguments=inference.vllm_arguments,
        )
        for index in range(inference.inference_num_workers)
    ]
