"""The inference servers of a run. A Ray actor on each server's node starts it and watches it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from telescope_core.errors import ProcessDiedError
from telescope_train.cluster.ray_cluster import answer
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.server import ServerProcess, ServerSettings

WATCH_EVERY_S = 1.0
"""Seconds between two rounds of questions to the keepers."""


# The server is a child of an actor and not of the driver: Ray places actors on any node, and ends
# them when the driver is gone. The server's watchdog then ends the server.
# Ray runs the calls of this actor one at a time, so `close` waits behind a `check` that is under
# way, for at most the 5 s of its health request.
class ServerKeeper:
    """Runs on the server's node: starts the server, watches it and ends it."""

    def __init__(self, settings: ServerSettings) -> None:
        self._server = ServerProcess(settings)

    def pid(self) -> int:
        """Return the process id of the server."""
        return self._server.pid

    def is_healthy(self) -> bool:
        """Whether the server answers; raises ProcessDiedError if it has ended."""
        return self._server.is_healthy()

    def check(self) -> None:
        """Raise ProcessDiedError if the server or its engine has ended."""
        self._server.check()
        self._server.check_engine()

    def close(self) -> None:
        """End the server."""
        self._server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandle:
    """One server, as the driver sees it."""

    settings: ServerSettings
    keeper: Any
    """Ray's handle of the server's `ServerKeeper`."""

    @property
    def label(self) -> str:
        """The name of the keeper in messages."""
        return f"the keeper of inference server {self.settings.base_url}"


class ServerGroup:
    """All inference servers of a run."""

    def __init__(self, servers: Sequence[ServerHandle]) -> None:
        self.servers = list(servers)

    @classmethod
    def start(
        cls, settings: Sequence[ServerSettings], places: Sequence[dict[str, Any]]
    ) -> "ServerGroup":
        """Start one server per place. Returns at once; `wait_until_healthy` waits for them."""
        keeper_class = ray.remote(ServerKeeper)
        return cls(
            [
                ServerHandle(settings=one, keeper=keeper_class.options(**place).remote(one))
                for one, place in zip(settings, places, strict=True)
            ]
        )

    @property
    def base_urls(self) -> list[str]:
        """Addresses of all servers."""
        return [server.settings.base_url for server in self.servers]

    async def wait_until_healthy(self, deadline_s: float) -> None:
        """Return once every server answers its health check.

        Raises ProcessDiedError if one ends, or if not all are healthy after `deadline_s` seconds.
        """
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*(_until_healthy(server) for server in self.servers))
        except TimeoutError:
            raise ProcessDiedError(
                f"the inference servers were not all healthy within {deadline_s:g} s; "
                f"their logs are in {self.servers[0].settings.log_path.parent}"
            ) from None

    async def watch(self) -> None:
        """Never return; raises ProcessDiedError as soon as a server has ended."""
        # Nothing tells the driver about a death: the server is a child of the keeper's, not of
        # Ray's. So the keepers are asked. If a keeper itself is dead, `answer` raises for it.
        while True:
            for server in self.servers:
                await answer(server.keeper.check.remote(), process=server.label)
            await asyncio.sleep(WATCH_EVERY_S)

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


async def _until_healthy(server: ServerHandle) -> None:
    while not await answer(server.keeper.is_healthy.remote(), process=server.label):  # noqa: ASYNC110 (another process: there is no event to wait for)
        await asyncio.sleep(0.1)


def server_settings(
    config: TrainConfig, *, device: str, dtype: str, max_model_len: int, log_folder: Path
) -> list[ServerSettings]:
    """Return the settings of each server. Ports are consecutive; each has a log file of its own.

    `max_model_len`: tokens of prompt and answer together.
    """
    inference, model = config.inference, config.model
    transport = config.weights.weight_transport
    return [
        ServerSettings(
            model_path=model.model,
            host=inference.inference_host,
            port=inference.inference_base_port + index,
            log_path=log_folder / f"inference-{index}.log",
            device=device,
            num_threads=max(1, int(config.ray.ray_inference_cpus_per_worker)),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=inference.max_num_seqs,
            gpu_memory_utilization=inference.gpu_memory_utilization,
            weight_transport="gloo" if transport == "auto" else transport,
            trust_remote_code=model.trust_remote_code,
        )
        for index in range(inference.inference_num_workers)
    ]
