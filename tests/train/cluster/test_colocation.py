"""Turns on one GPU. The GPU is a stand-in that counts: nothing here has run on a real one."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest

from telescope_core.errors import ProcessDiedError, TelescopeError
from telescope_train import resources
from telescope_train.cluster.colocation import GpuSharing, ResidentGpu, SharedGpu, sleep_level
from telescope_train.cluster.placement import bundles_of
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.sleep import SleepingServers
from telescope_train.plan.load import load_train_config

FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m", "--max_async_rollout", "0"]
ENVIRONMENTS = ["--environments", '[{"name": "a"}]']


def config(*more: str) -> Any:
    return load_train_config([], [*FLAGS, *ENVIRONMENTS, "--colocate", *more])


class Gpu:
    """A server that obeys control calls, and a rank, on the memory of one GPU."""

    base_url = "http://server"
    num_in_flight = 0

    def __init__(self) -> None:
        self.held = {"server": 60, "rank": 20}
        self.calls: list[str] = []

    async def control(self, path: str, *, query: str = "", is_repeatable: bool) -> None:
        assert is_repeatable
        self.calls.append(path + query)
        self.held["server"] = 2 if path == "/sleep" else 60
        self.check()

    async def train(self) -> None:
        self.held["rank"] = 70
        self.check()

    async def free_cached_memory(self) -> None:
        self.held["rank"] = 20

    def check(self) -> None:
        assert sum(self.held.values()) <= 80, f"out of memory: {self.held}"


def shared(gpu: Any, *, level: int) -> SharedGpu:
    return SharedGpu(SleepingServers(ServerPool([gpu]), gpu, level=level), gpu)


def test_server_and_rank_never_need_more_than_the_gpu_has():
    async def main() -> None:
        gpu: Any = Gpu()
        gpu_sharing = shared(gpu, level=2)
        for _ in range(3):
            await gpu_sharing.trainer_works()
            await gpu_sharing.trainer_works()
            await gpu.train()
            await gpu_sharing.servers_work()
            await gpu_sharing.servers_work()
        sleeps, wakes = gpu.calls[::2], gpu.calls[1::2]
        assert sleeps == ["/sleep?level=2&mode=wait"] * 3
        assert wakes == ["/wake_up"] * 3
        with pytest.raises(AssertionError):
            await gpu.train()

    asyncio.run(main())


def test_what_is_scored_in_between_costs_a_server_no_weights():
    async def main() -> None:
        gpu: Any = Gpu()
        gpu_sharing = shared(gpu, level=2)
        async with gpu_sharing.trainers_turn():
            await gpu.train()
        assert gpu.held == {"server": 60, "rank": 20}
        assert gpu.calls == ["/sleep?level=1&mode=wait", "/wake_up"]
        await gpu_sharing.trainer_works()
        with pytest.raises(AssertionError, match="forgotten their weights"):
            async with gpu_sharing.trainers_turn():
                pass
        async with GpuSharing().trainers_turn():
            pass

    asyncio.run(main())


def test_a_turn_that_was_broken_off_is_taken_from_its_beginning():
    """As when a rank dies meanwhile: the next ones load the model in the trainer's turn."""

    async def main() -> None:
        gpu: Any = Gpu()
        gpu_sharing = shared(gpu, level=2)

        async def broken_off(turn: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(turn)
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        async with gpu_sharing.servers_turn():  # a server starts
            await broken_off(gpu_sharing.trainer_works())
            working = asyncio.create_task(gpu_sharing.trainer_works())
            await asyncio.sleep(0)
            assert not working.done()
            assert not gpu.calls
        await working
        await gpu.train()
        obeys = gpu.control
        gpu.control = lambda *told, **named: asyncio.Event().wait()
        await broken_off(gpu_sharing.servers_work())  # while servers wake
        gpu.control = obeys
        await gpu_sharing.trainer_works()
        await gpu.train()
        await gpu_sharing.servers_work()
        assert gpu.held == {"server": 60, "rank": 20}
        assert gpu.calls == ["/sleep?level=2&mode=wait"] * 2 + ["/wake_up"]

    asyncio.run(main())


def test_a_server_with_a_request_does_not_sleep():
    async def main() -> None:
        gpu: Any = Gpu()
        gpu.num_in_flight = 3
        with pytest.raises(TelescopeError, match="got 3 in flight"):
            await shared(gpu, level=1).trainer_works()
        assert gpu.calls == []

    asyncio.run(main())


class RestingRanks:
    """A trainer that writes down what it does beside a server that starts."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.is_dead = False

    async def free_cached_memory(self) -> None:
        self.order.append("freed")
        if self.is_dead:
            raise ProcessDiedError("a rank has died")


def test_a_resident_server_starts_again_while_the_ranks_rest_without_their_cache():
    async def main() -> None:
        ranks = RestingRanks()
        gpu_sharing = ResidentGpu(ranks)
        begun, healthy = asyncio.Event(), asyncio.Event()

        async def start() -> None:
            async with gpu_sharing.server_starts():
                ranks.order.append("server starts")
                begun.set()
                await healthy.wait()
                ranks.order.append("server is there")

        async def step() -> None:
            await gpu_sharing.trainer_works()
            ranks.order.append("trainer works")

        await step()
        starting = asyncio.create_task(start())
        await asyncio.sleep(0)
        assert ranks.order == ["trainer works"]
        await gpu_sharing.servers_work()
        ranks.is_dead = True  # which has no memory to free
        await begun.wait()
        working = asyncio.create_task(step())
        await asyncio.sleep(0)
        async with gpu_sharing.servers_turn():
            healthy.set()  # rollouts and updates of weights go on, whatever the trainer does
        await asyncio.gather(starting, working)
        assert ranks.order[1:4] == ["freed", "server starts", "server is there"]
        assert ranks.order[4:] == ["trainer works"]

    asyncio.run(main())


def test_who_has_a_gpu_of_their_own_waits_for_nobody():
    async def main() -> None:
        await GpuSharing().trainer_works()
        await GpuSharing().servers_work()
        async with GpuSharing().servers_turn():
            pass

    asyncio.run(main())


def test_weights_are_forgotten_only_if_all_of_them_are_sent_again():
    assert sleep_level(config()) == 2
    assert sleep_level(config("--use_lora")) == 1
    assert sleep_level(config("--colocate_sleep_level", "1")) == 1


def test_both_get_a_half_of_one_gpu():
    server, rank = bundles_of(config("--ray_trainer_cpus_per_worker", "3"), "cuda")
    assert (server.cpus, rank.cpus) == (1.0, 3.0)
    assert server.gpus + rank.gpus == 1
    assert {bundle.gpus for bundle in bundles_of(config(), "cpu")} == {0}


class Starts:
    """The start of a server and a rank on the memory of one GPU, step by step."""

    reached = (("http://server", "name"),)

    def __init__(self, monkeypatch: Any) -> None:
        self.order: list[str] = []
        self.gpu: Any = Gpu()
        self.gpu.close = self.closed
        monkeypatch.setattr(resources, "TokenClient", lambda *told, **named: self.gpu)

    async def started(self, name: str) -> dict[int, str]:
        self.order.append(f"{name} starts")
        await asyncio.sleep(0)
        self.order.append(f"{name} is ready")
        return {}

    async def loaded(self) -> None:
        await self.started("rank")
        if self.gpu.calls:
            await self.gpu.train()  # its rehearsed step, whose memory stays in torch's cache

    async def closed(self) -> None:
        self.order.append("closed")

    async def both(self, *, takes_turns: bool) -> Any:
        servers: Any = self
        return await resources.one_after_another(
            self.started("server"),
            self.started("import"),
            self.loaded(),
            servers,
            "",
            shared_with=self.gpu,
            takes_turns=takes_turns,
        )


def test_resident_processes_start_one_after_another_and_nobody_sleeps(monkeypatch):
    """A server measures what is free as it starts."""
    starts = Starts(monkeypatch)
    assert asyncio.run(starts.both(takes_turns=False)) == {}
    # What needs no GPU is done beside the server's start.
    ready = ["server starts", "import starts", "server is ready", "import is ready"]
    assert starts.order == [*ready, "rank starts", "rank is ready"]
    assert starts.gpu.calls == []


def test_a_server_that_takes_turns_wakes_when_the_rank_has_freed_what_loading_needed(monkeypatch):
    starts = Starts(monkeypatch)
    assert asyncio.run(starts.both(takes_turns=True)) == {}
    assert starts.order[4:] == ["rank starts", "rank is ready", "closed"]
    assert starts.gpu.calls == ["/sleep?level=1&mode=wait", "/wake_up"]
    assert starts.gpu.held == {"server": 60, "rank": 20}
