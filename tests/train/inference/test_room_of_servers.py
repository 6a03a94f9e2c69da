"""No server works for more than its share of slots, as long as another one has room."""

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.train.inference.test_servers import World, in_world
from tests.train.simulation.test_simulated_runs import scenario

from telescope_core.types import Sampling
from telescope_train.inference.generation import QueuePosition, Request
from telescope_train.observability.calls import Watching
from telescope_train.rollouts.slots import Concurrency, Slots
from telescope_train.simulation.servers import TOKENS_PER_ID, Planned

Plan = Sequence[tuple[int, int]]
"""Of a rollout: steps of the engine that an answer takes, and those of the tool after it."""


class Crowd:
    """Rollouts with several turns over the servers of a world, each call in a slot."""

    def __init__(self, world: World, most: int) -> None:
        num_servers = len(world.pool.servers)
        self.world = world
        self.slots = Slots(most * num_servers)
        self.most_seen = [0] * num_servers
        self.servers_of: dict[str, list[int]] = {}
        world.pool.limit(most)

    async def play(self, rollout_id: str, turns: Plan) -> None:
        ids: list[int] = [3]
        for num_tokens, tool_steps in turns:
            await self.slots.enter((0,))
            try:
                ids = [*ids, *await self._call(rollout_id, ids, num_tokens)]
            finally:
                self.slots.leave()
            await asyncio.sleep(0.01 * tool_steps)

    async def _call(self, rollout_id: str, ids: list[int], num_tokens: int) -> list[int]:
        pool = self.world.pool

        def sent(address: str, version: int) -> None:
            names = [server.client.base_url for server in pool.servers]
            self.servers_of.setdefault(rollout_id, []).append(names.index(address))

        calling = asyncio.create_task(
            pool.generate(
                Request(
                    prompt_ids=Planned(
                        ids, rollout_id=rollout_id, num_tokens=num_tokens * TOKENS_PER_ID
                    ),
                    sampling=Sampling(max_tokens=10**6),
                    group_id=rollout_id.partition("/")[0],
                    position=QueuePosition(rollout_id, 1),
                    watching=Watching(on_sent=sent),
                )
            )
        )
        await asyncio.sleep(0)
        now = [server.num_in_slots for server in pool.servers]
        self.most_seen = list(map(max, self.most_seen, now))
        return list((await calling).token_ids)


turns = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=3)


@settings(max_examples=40)
@given(
    st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_no_server_works_for_more_than_it_may(
    groups: list[list[Plan]], num_servers: int, most: int
) -> None:
    async def main(world: World) -> None:
        crowd = Crowd(world, most)
        await asyncio.gather(
            *(
                crowd.play(f"g{number}/{index}", turns)
                for number, group in enumerate(groups)
                for index, turns in enumerate(group)
            )
        )
        assert max(crowd.most_seen) <= most
        assert not any(server.num_in_slots for server in world.pool.servers)

    in_world(main, num_servers=num_servers)


def test_a_rollout_that_found_no_room_stays_where_it_went() -> None:
    async def main(world: World) -> None:
        crowd = Crowd(world, 2)
        together = (crowd.play(f"g/{index}", [(20, 1)] * 3) for index in range(3))
        await asyncio.gather(*together)
        assert crowd.servers_of == {"g/0": [0] * 3, "g/1": [0] * 3, "g/2": [1] * 3}

    in_world(main, num_servers=2)


def test_what_a_lost_server_was_doing_waits_for_no_room() -> None:
    async def main(world: World) -> None:
        crowd = Crowd(world, 2)
        playing = [
            asyncio.create_task(crowd.play(f"{name}/0", [(50, 0)])) for name in ("a", "b", "c", "d")
        ]
        await asyncio.sleep(0.1)
        world.engines[0].die("killed")
        await asyncio.sleep(0.05)
        assert world.pool.servers[1].num_in_slots == 4
        await asyncio.gather(*playing)

    in_world(main, num_servers=2)


def test_the_settings_of_a_run_bound_each_of_its_servers() -> None:
    async def main(world: World) -> None:
        config = scenario().config
        most = config.scheduling.max_concurrent_prompts_per_server * config.largest_group
        Concurrency.from_config(config, Slots(2 * most), world.pool)
        assert [server.most_in_slots for server in world.pool.servers] == [most] * 2

    in_world(main, num_servers=2)
