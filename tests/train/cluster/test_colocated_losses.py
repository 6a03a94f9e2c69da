"""Servers that die or hang beside trainer ranks on the same GPUs, in virtual time.

The memory of each GPU is counted: a server that starts while the trainer works, or that hangs and
keeps its memory, is one too many.
"""

import asyncio
import random
from typing import Any

import pytest
from tests.simulation.fleet import SimulatedFleet
from tests.train.inference.test_servers import SPEED, TIMES

from telescope_core.records.servers import ServerState
from telescope_core.types import Sampling
from telescope_train.cluster.colocation import SharedGpu
from telescope_train.inference.generation import Request
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.sleep import (
    SLEEP_PATH,
    WAKE_PATH,
    SharedGpuFleet,
    SleepingServers,
    bring_in_when_awake,
)
from telescope_train.inference.supervisor import Supervisor
from telescope_train.simulation.engine import SimulatedEngine
from telescope_train.simulation.servers import TOKENS_PER_ID, Planned, SimulatedClient
from telescope_train.simulation.trainer import SimulatedRanks, TrainerSpeed
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.weights.publish import WeightPublisher

AWAKE, ASLEEP = 60, 2
WAITS, WORKS = 18, 70
ROOM = 80
TRAIN_S = 30.0


class Gpus:
    """What servers and ranks hold of each GPU; a server and a rank share one."""

    def __init__(self, number: int) -> None:
        self.servers, self.ranks = [AWAKE] * number, [WAITS] * number

    def server(self, index: int, held: int) -> None:
        self.servers[index] = held
        self.check()

    def trainer(self, held: int) -> None:
        self.ranks = [held] * len(self.ranks)
        self.check()

    def check(self) -> None:
        for server, rank in zip(self.servers, self.ranks, strict=True):
            assert server + rank <= ROOM, f"out of memory: {self.servers} and {self.ranks}"


class Client(SimulatedClient):
    """The way to a server that sleeps and wakes, and forgets its weights as it does."""

    def __init__(self, engine: SimulatedEngine, index: int, world: "World") -> None:
        super().__init__(engine, TIMES, lambda: world.ranks.digest)
        self.index, self.gpus = index, world.gpus
        self.loses_answer = lambda path: not engine.is_alive

    def obey(self, path: str, body: dict[str, Any], query: str) -> Any:
        if path not in (SLEEP_PATH, WAKE_PATH):
            return super().obey(path, body, query)
        self.engine.require_alive()
        if self.engine.is_alive:
            self.gpus.server(self.index, ASLEEP if path == SLEEP_PATH else AWAKE)
            self._received = ""
        return None


class Fleet(SimulatedFleet):
    """Processes that hold memory until they are ended, or have died by themselves."""

    def __init__(self, world: "World") -> None:
        super().__init__(world.engines, start_s=40.0)
        self.world = world
        self.starts: list[float] = []

    async def start_again(self, index: int) -> str:
        self.world.gpus.server(index, 0)
        # It takes what it needs as it starts.
        self.world.gpus.server(index, AWAKE)
        self.starts.append(asyncio.get_running_loop().time())
        return await super().start_again(index)

    async def end(self, index: int) -> None:
        self.world.engines[index].die("it is ended")
        self.world.gpus.server(index, 0)


class World:
    """Two GPUs with a server and a rank each; inside the loop."""

    def __init__(self) -> None:
        self.gpus = Gpus(2)
        self.ranks = SimulatedRanks(2, TrainerSpeed(send_s=0.5, optimizer_s=1.0))
        self.engines = [SimulatedEngine(SPEED, name=f"server-{n}") for n in range(2)]
        self.clients = [Client(engine, n, self) for n, engine in enumerate(self.engines)]
        self.pool = ServerPool(self.clients, is_kept=True)
        self.publisher = WeightPublisher(self.pool, self.ranks, in_flight="continue")
        self.fleet = Fleet(self)
        self.gpu_sharing = SharedGpu(SleepingServers(self.pool, self.fleet, level=2), self)

    async def free_cached_memory(self) -> None:
        self.gpus.trainer(WAITS)

    def supervising(self) -> Supervisor:
        bring_in = bring_in_when_awake(self.publisher.give, self.gpu_sharing)
        return Supervisor(self.pool, SharedGpuFleet(self.fleet, self.gpu_sharing), bring_in)

    def die(self, index: int) -> None:
        """The process is gone, and its memory with it."""
        self.engines[index].die("killed")
        self.gpus.server(index, 0)

    def learn(self) -> None:
        """Change the weights, and with them their digest."""
        self.ranks.num_steps += 1

    async def sample(self, step: int) -> None:
        """Play a batch."""
        await asyncio.gather(
            *(
                self.pool.generate(
                    Request(
                        prompt_ids=Planned(
                            [3], rollout_id=f"{step}-{n}/0", num_tokens=20 * TOKENS_PER_ID
                        ),
                        sampling=Sampling(max_tokens=10**6),
                        group_id=f"{step}-{n}",
                    )
                )
                for n in range(8)
            )
        )

    async def step(self, step: int) -> None:
        await self.sample(step)
        await self.gpu_sharing.trainer_works()
        await self.publisher.weights_change()
        self.gpus.trainer(WORKS)
        await asyncio.sleep(TRAIN_S)
        self.learn()
        await self.gpu_sharing.servers_work()
        await self.publisher.publish(step)

    async def until_all_serve(self) -> None:
        for server in self.pool.servers:
            await server.until(ServerState.SERVING)


def in_world(main: Any) -> Any:
    async def run() -> Any:
        world = World()
        await world.publisher.connect()
        kept = asyncio.create_task(world.supervising().run())
        working = asyncio.create_task(main(world))
        await asyncio.wait([kept, working], return_when=asyncio.FIRST_COMPLETED)
        for task in (kept, working):
            task.cancel()
        await asyncio.wait([kept, working])
        if not kept.cancelled():
            kept.result()
        return working.result()

    return run_in_virtual_time(run)


def test_a_server_that_dies_while_the_trainer_works_starts_in_the_servers_turn() -> None:
    async def main(world: World) -> None:
        clock = asyncio.get_running_loop()
        await world.step(1)
        await world.sample(2)
        await world.gpu_sharing.trainer_works()
        world.gpus.trainer(WORKS)
        world.die(0)
        await asyncio.sleep(TRAIN_S)
        assert world.fleet.starts == []
        world.learn()
        begun_s = clock.time()
        await world.gpu_sharing.servers_work()
        await world.publisher.publish(2)
        await world.until_all_serve()
        assert world.fleet.starts == [pytest.approx(begun_s + TIMES.round_trip_s)]
        # With the weights of this step, and proof of them.
        assert [client._received for client in world.clients] == [world.ranks.digest] * 2
        assert [one.version for one in world.engines] == [2, 2]
        assert [one.life for one in world.pool.servers] == [2, 1]

    in_world(main)


def test_a_server_that_does_not_sleep_is_ended_before_the_trainer_works() -> None:
    async def main(world: World) -> None:
        await world.step(1)
        world.engines[1].hang()
        await world.gpu_sharing.trainer_works()
        assert world.gpus.servers == [ASLEEP, 0]
        world.gpus.trainer(WORKS)
        await world.gpu_sharing.servers_work()
        await world.until_all_serve()
        assert [client._received for client in world.clients] == ["", world.ranks.digest]
        await world.publisher.publish(2)
        assert [client._received for client in world.clients] == [world.ranks.digest] * 2

    in_world(main)


def test_the_trainers_turn_waits_for_a_server_that_starts() -> None:
    async def main(world: World) -> None:
        clock = asyncio.get_running_loop()
        await world.step(1)
        world.die(0)
        await world.sample(2)
        assert clock.time() < world.fleet.starts[0] + 40.0, "the other one has played the batch"
        await world.gpu_sharing.trainer_works()
        assert clock.time() >= world.fleet.starts[0] + 40.0
        world.gpus.trainer(WORKS)
        assert world.pool.servers[0].state in (ServerState.LOADING, ServerState.SERVING)
        world.learn()
        await world.gpu_sharing.servers_work()
        await world.publisher.publish(2)
        assert [one.version for one in world.engines] == [2, 2]

    in_world(main)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_when_memory_is_enough_and_all_get_the_weights(seed: int) -> None:
    async def main(world: World) -> None:
        chance = random.Random(seed)
        num_steps = 8

        async def lose_some() -> None:
            for _ in range(12):
                await asyncio.sleep(chance.uniform(5.0, 90.0))
                index = chance.randrange(2)
                if world.engines[index].is_alive and chance.random() < 0.5:
                    world.die(index)
                elif world.engines[index].is_alive:
                    world.engines[index].hang()

        losing = asyncio.create_task(lose_some())
        for step in range(1, num_steps + 1):
            await world.step(step)
        losing.cancel()
        await world.until_all_serve()
        assert world.fleet.starts
        assert [client._received for client in world.clients] == [world.ranks.digest] * 2
        assert [one.version for one in world.engines] == [num_steps] * 2

    in_world(main)
