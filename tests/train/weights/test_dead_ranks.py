"""Trainer ranks die in a weight update: servers stay, and get the weights of the new ranks."""

import asyncio
from typing import Any

import pytest
from tests.train.inference.test_servers import World, in_world

from telescope_core.errors import EndpointError
from telescope_core.records.servers import ServerState
from telescope_train.backends.protocol import RankDiedError, TransferError
from telescope_train.backends.transfer import Place
from telescope_train.inference.wire import PAUSE_PATH
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.trainer.ranks import AllRanks
from telescope_train.weights.publish import LEFT_ALONE_S


class Update:
    """Makes a world's ranks die in the next transfer, and servers strict as vLLM is."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.are_dead = False
        self.queries: list[str] = []
        self.groups: list[int] = []
        ranks, send = world.ranks, world.ranks.send_weights
        connect = world.ranks.connect

        async def send_weights() -> str:
            if self.are_dead:
                await asyncio.sleep(0.1)
                raise RankDiedError("trainer rank 1 died")
            return await send()

        async def noted(place: Place, **options: Any) -> None:
            self.groups.append(place.world_size)
            await connect(place, **options)

        ranks.send_weights, ranks.connect = send_weights, noted  # type: ignore[method-assign]
        for client in world.clients:
            client.control = self._strict(client.control)  # type: ignore[method-assign]

    def _strict(self, control: Any) -> Any:
        is_open = False

        async def strict(path: str, body: Any = None, **options: Any) -> Any:
            nonlocal is_open
            if path == PAUSE_PATH:
                self.queries.append(options["query"])
            if path == "/start_weight_update":
                assert not is_open, "an update was begun twice"
                is_open = True
            if path == "/finish_weight_update":
                assert is_open, "an update was ended that had not begun"
                is_open = False
            if path == "/update_weights" and self.are_dead:
                await asyncio.sleep(0.2)
                is_open = False
                raise EndpointError("HTTP 500: the connection to rank 0 was closed")
            return await control(path, body, **options)

        return strict


@pytest.mark.parametrize("cancelled_after_s", [None, 0.0005, 0.05, 0.15])
def test_an_update_that_ranks_left_is_made_again(cancelled_after_s: float | None) -> None:
    async def main(world: World) -> None:
        update = Update(world)
        await world.publisher.connect()
        await world.publisher.publish(7)
        await world.publisher.weights_change()
        update.are_dead = True
        publishing = asyncio.create_task(world.publisher.publish(8))
        if cancelled_after_s is None:
            with pytest.raises(RankDiedError):
                await publishing
        else:
            await asyncio.sleep(cancelled_after_s)
            publishing.cancel()
            await asyncio.wait([publishing])
        assert world.pool.version == 7
        await world.publisher.weights_change()
        update.are_dead, update.queries = False, []
        await world.publisher.restore(6)
        assert update.groups == [3, 3]
        assert set(update.queries) == {"?cache=clear"}
        assert world.pool.version == 6
        assert [server.state for server in world.pool.servers] == [ServerState.SERVING] * 2
        assert [server.version for server in world.pool.servers] == [6, 6]
        answer = await world.sample("a", 5)
        assert [span.version for span in answer.spans] == [6]
        await world.publisher.publish(7)
        assert world.pool.version == 7
        assert ServerState.LOST not in world.states(0)

    in_world(main)


@pytest.mark.parametrize("error", [RankDiedError("rank 0 died"), TransferError("not all joined")])
def test_servers_that_wait_for_ranks_that_left_are_not_waited_for(error: Exception) -> None:
    async def main(world: World) -> None:
        async def connect(place: Place, **options: Any) -> None:
            raise error

        async def waits(path: str, body: Any = None, **options: Any) -> Any:
            await asyncio.sleep(120)
            raise EndpointError("not all have joined")

        world.ranks.connect = connect  # type: ignore[method-assign]
        world.clients[0].control = waits  # type: ignore[method-assign]
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(type(error)):
            await world.publisher.connect()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(LEFT_ALONE_S, abs=1)
        assert world.pool.servers[0].state is ServerState.LOST
        assert "that the trainer has left" in world.pool.servers[0].reason
        assert world.pool.servers[1].state is not ServerState.LOST

    in_world(main)


class OneOfTwo:
    """A rank of which one call fails after some seconds."""

    def __init__(self, seconds: float, failure: Exception) -> None:
        self._seconds, self._failure = seconds, failure

    async def call(self, name: str, *arguments: Any) -> Any:
        await asyncio.sleep(self._seconds)
        raise self._failure

    async def address(self) -> tuple[str, int]:
        raise AssertionError("nobody asks")


@pytest.mark.parametrize("death_s", [1.0, 3.0])
def test_a_death_is_told_rather_than_what_it_did_to_the_others(death_s: float) -> None:
    async def main() -> None:
        broken = TransferError("connection closed by peer")
        ranks = AllRanks([OneOfTwo(2.0, broken), OneOfTwo(death_s, RankDiedError("rank 1 died"))])
        with pytest.raises(RankDiedError, match="rank 1 died"):
            await ranks.send_weights()

    run_in_virtual_time(main)
