"""The inference servers of a run, their settings, and their secrets."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from telescope_core.base.errors import ConfigError, ProcessDiedError
from telescope_core.records.logs import log_name
from telescope_core.records.output_logs import INFERENCE
from telescope_train.config.inference_section import LOOPBACK
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerSettings, Silence
from telescope_train.inference.server_actor import ServerHandle, ServerPorts, Startup
from telescope_train.inference.servers import Loss, Reached, ServerDiedError
from telescope_train.inference.wire import SECRET_VARIABLE
from telescope_train.models.served_adapter import served_adapter

_LOGGER = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0
"""Seconds between two checks of the actors."""
SHORTEST_SECRET = 16
AT_ITS_NODE = ""
"""Host of a server that is to use the address of its node."""
PLACEMENT_S = 300.0
"""Longest wait for a new actor, unless set; see `ray_placement_timeout_s`."""


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
        while True:
            now: Startup = await server.ask("startup")
            self._reached[index] = now.reached
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


def server_secret(environ: Mapping[str, str]) -> str:
    """Return the secret for the servers of a run: a new one, or the one in the settings.

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
            traces_endpoint=traces_endpoint,
            traces_secret=secret,
            returns_routes=config.trainer.routing_replay,
            adapter=served_adapter(config),
            more_arguments=inference.vllm_arguments,
        )
        for index in range(inference.inference_num_workers)
    ]
