"""Trainer ranks die in a weight update: servers stay, and get the weights of the new ranks."""

import asyncio
from typing import Any

import pytest
from tests.train.inference.test_leases import World, in_world

from telescope_core.errors import EndpointError
from telescope_core.records.servers import ServerState
from telescope_train.backends.protocol import RankDiedError
from telescope_train.inference.wire import PAUSE_PATH


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

        async def noted(host: str, port: int, world_size: int) -> None:
            self.groups.append(world_size)
            await connect(host, port, world_size)

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
        assert [lease.state for lease in world.pool.leases] == [ServerState.SERVING] * 2
        assert [lease.version for lease in world.pool.leases] == [6, 6]
        answer = await world.sample("a", 5)
        assert [span.version for span in answer.spans] == [6]
        await world.publisher.publish(7)
        assert world.pool.version == 7
        assert ServerState.LOST not in world.states(0)

    in_world(main)
