"""The inference servers of a run. A Ray actor on each server's node starts it and watches it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from telescope_core.errors import ProcessDiedError
from telescope_core.records.logs import Logs, log_name, telling_failure
from telescope_core.records.output_logs import INFERENCE
from telescope_train.cluster.ray_cluster import answer
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerProcess, ServerSettings
from telescope_train.models.served_adapter import served_adapter

_LOGGER = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
"""Seconds between two rounds of questions to the keepers."""
KEEPER_DEADLINE_S = 600.0
"""Longest that a keeper may take for an answer, its own start included, in seconds."""


class Startup(NamedTuple):
    """How far a server is."""

    is_healthy: bool
    log_bytes: int
    """Size of its log, which grows while it does something."""


# The server is a child of an actor and not of the driver: Ray places actors on any node, and ends
# them when the driver is gone. The server's watchdog then ends the server.
# Ray runs the calls of this actor one at a time, so `close` waits behind a `check` that is under
# way, for at most the 5 s in which it waits for a sign of life.
class ServerKeeper:
    """Runs on the server's node: starts the server, watches it and ends it."""

    def __init__(self, settings: ServerSettings) -> None:
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
        return Startup(is_healthy, self._server.log_bytes())

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
class ServerHandle:
    """One server, as the driver sees it."""

    settings: ServerSettings
    place: dict[str, Any]
    """Where Ray puts the keeper."""
    keeper: Any
    """Ray's handle of the server's `ServerKeeper`."""

    @classmethod
    def start(cls, settings: ServerSettings, place: dict[str, Any]) -> "ServerHandle":
        """Start the server. Returns at once."""
        keeper = ray.remote(ServerKeeper).options(**place).remote(settings)
        return cls(settings=settings, place=place, keeper=keeper)

    async def ask(self, question: str) -> Any:
        """Return the answer of the keeper's method `question`."""
        process = f"the keeper of inference server {self.settings.base_url}"
        reference = getattr(self.keeper, question).remote()
        try:
            return await answer(reference, process=process, timeout_s=KEEPER_DEADLINE_S)
        except RayError as error:
            # Whatever it could not do, such as to start a process: one server is lost, no more.
            raise ProcessDiedError(f"{process} failed: {error}") from None


class ServerGroup:
    """All inference servers of a run."""

    def __init__(
        self, servers: Sequence[ServerHandle], *, silence_s: float, progress_s: float
    ) -> None:
        """`silence_s`: longest that a server that starts may write nothing to its log.

        `progress_s`: longest that one that serves may do nothing, or not answer.
        """
        self.servers = list(servers)
        self._silence_s = silence_s
        self._progress_s = progress_s

    @classmethod
    def start(
        cls,
        settings: Sequence[ServerSettings],
        places: Sequence[dict[str, Any]],
        *,
        silence_s: float,
        progress_s: float,
    ) -> "ServerGroup":
        """Start one server per place. Returns at once; `wait_until_healthy` waits for them."""
        servers = [
            ServerHandle.start(one, place) for one, place in zip(settings, places, strict=True)
        ]
        return cls(servers, silence_s=silence_s, progress_s=progress_s)

    @property
    def base_urls(self) -> list[str]:
        """Addresses of all servers."""
        return [server.settings.base_url for server in self.servers]

    async def wait_until_healthy(self, *, num_needed: int) -> dict[int, str]:
        """Return once every server answers its health check or has failed to start.

        Returns why, by the number of each that has failed: one that ends, or writes nothing to its
        log for too long. Raises ProcessDiedError if none of the first `num_needed` is there.
        """
        starting = [_until_healthy(server, self._silence_s) for server in self.servers]
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

    async def start_again(self, index: int) -> None:
        """End what is left of a server, and start it; returns when it is healthy."""
        server = self.servers[index]
        try:
            await server.ask("start_again")
        except ProcessDiedError:
            # The keeper is gone, with its node or without. Its watchdog has ended the server.
            ray.kill(server.keeper)
            server = self.servers[index] = ServerHandle.start(server.settings, server.place)
        await _until_healthy(server, self._silence_s)

    async def close(self) -> None:
        """End all servers, and ignore those that are already gone."""
        # All are told first and then awaited, so that they end at the same time. 30 s cover the
        # longest `close`: a health request of 5 s before it, 5 s of grace, 10 s after SIGKILL.
        closing = [server.keeper.close.remote() for server in self.servers]
        # Errors are dropped: a keeper that is gone has no server left to end, and a failed cleanup
        # must not hide the failure that ended the run.
        await asyncio.gather(
            *(asyncio.wait_for(one, 30.0) for one in closing), return_exceptions=True
        )


async def _until_healthy(server: ServerHandle, silence_s: float) -> None:
    # A server says in its log what it is doing: it downloads, loads each file, compiles, captures
    # graphs. A large model may take any time for that, while one that hangs falls silent.
    log_bytes, spoke_at_s = -1, time.monotonic()
    while not (now := await server.ask("startup")).is_healthy:
        if now.log_bytes != log_bytes:
            log_bytes, spoke_at_s = now.log_bytes, time.monotonic()
        elif time.monotonic() - spoke_at_s > silence_s:
            raise ProcessDiedError(
                f"inference server at {server.settings.base_url} did not become healthy, and wrote "
                f"nothing to its log for {silence_s:g} s; its log is {server.settings.log_path}. "
                "Look there for what it waits for, or raise inference_startup_timeout_s"
            )
        await asyncio.sleep(0.1)


def server_settings(
    config: TrainConfig,
    *,
    device: str,
    dtype: str,
    max_model_len: int,
    log_folder: Path,
    traces_endpoint: str | None = None,
) -> list[ServerSettings]:
    """Return the settings of each server. Ports are consecutive; each has a log file of its own.

    `max_model_len`: tokens of prompt and answer together. `traces_endpoint`: where they send their
    traces; None = they keep none.
    """
    inference, model = config.inference, config.model
    return [
        ServerSettings(
            model_path=model.model,
            host=inference.inference_host,
            port=inference.inference_base_port + index,
            log_path=log_folder / log_name(INFERENCE, str(index)),
            number=index,
            device=device,
            num_threads=max(1, int(config.ray.ray_inference_cpus_per_worker)),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=inference.max_num_seqs,
            scheduling_policy=inference.vllm_scheduling_policy,
            gpu_memory_utilization=inference.gpu_memory_utilization,
            takes_weights=True,
            sleeps=inference.colocate,
            trust_remote_code=model.trust_remote_code,
            fp32_lm_head=model.fp32_lm_head,
            traces_endpoint=traces_endpoint,
            adapter=served_adapter(config),
        )
        for index in range(inference.inference_num_workers)
    ]
