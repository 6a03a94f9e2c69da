"""Servers that are lost: requests go on, weights reach those that are left, and all come back."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.simulation.fleet import SimulatedFleet

from telescope_core.errors import EndpointLostError, ProcessDiedError
from telescope_core.records.servers import ServerEvent, ServerState
from telescope_core.types import Sampling
from telescope_train.inference.generation import Request, ServerLostError
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import _NEXT, Server
from telescope_train.inference.supervisor import GOOD_LIFE_S, MOST_RESTARTS, Fleet, Supervisor
from telescope_train.observability.calls import CallEnd, Watching
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.servers import (
    TOKENS_PER_ID,
    Planned,
    ServerTimes,
    SimulatedClient,
)
from telescope_train.simulation.trainer import SimulatedRanks, TrainerSpeed
from telescope_train.simulation.virtual_time import Deadlock, run_in_virtual_time
from telescope_train.weights.publish import WeightPublisher

SPEED = EngineSpeed(
    slots=64,
    cache_tokens=10**6,
    step_s=0.01,
    step_per_request_s=0.0,
    step_per_cached_token_s=0.0,
    prefill_tokens_per_s=10**9,
)
TIMES = ServerTimes(round_trip_s=0.001, transfer_s=0.5)


class World:
    """Some simulated servers, the pool and the publisher; inside the loop."""

    def __init__(self, num_servers: int = 2, *, is_kept: bool = True) -> None:
        self.events: list[ServerEvent] = []
        self.ends: list[CallEnd] = []
        self.ranks = SimulatedRanks(1, TrainerSpeed(send_s=0.5, optimizer_s=1.0))
        self.engines = [SimulatedEngine(SPEED, name=f"server-{n}") for n in range(num_servers)]
        self.clients = [
            SimulatedClient(engine, TIMES, lambda: self.ranks.digest) for engine in self.engines
        ]
        self.pool = ServerPool(self.clients, on_event=self.events.append, is_kept=is_kept)
        self.publisher = WeightPublisher(self.pool, self.ranks, in_flight="continue")

    def sample(self, name: str, num_ids: int) -> "asyncio.Task[Any]":
        prompt = Planned([3], rollout_id=f"{name}/0", num_tokens=num_ids * TOKENS_PER_ID)
        return asyncio.create_task(
            self.pool.generate(
                Request(
                    prompt_ids=prompt,
                    sampling=Sampling(max_tokens=10**6),
                    group_id=name,
                    watching=Watching(on_end=self.ends.append),
                )
            )
        )

    async def supervising(
        self, work: Coroutine[Any, Any, None], *, fleet: Fleet | None = None, **options: Any
    ) -> list[str]:
        """Do `work` while lost servers come back; returns what a person was told."""
        told: list[str] = []
        supervisor = Supervisor(
            self.pool,
            fleet or SimulatedFleet(self.engines, **options),
            self.publisher.bring_in,
            warn=told.append,
        )
        kept = asyncio.create_task(supervisor.run())
        working = asyncio.create_task(work)
        await asyncio.wait([kept, working], return_when=asyncio.FIRST_COMPLETED)
        for task in (kept, working):
            task.cancel()
        await asyncio.wait([kept, working])
        if not kept.cancelled():
            kept.result()
        working.result()
        return told

    def states(self, server: int) -> list[str]:
        name = self.engines[server].name
        return [f"{one.state}" for one in self.events if one.server == name]


def in_world(main, **options: Any) -> Any:
    async def run() -> Any:
        return await main(World(**options))

    return run_in_virtual_time(run)


def test_a_request_goes_on_elsewhere_after_the_tokens_that_it_had() -> None:
    async def main(world: World) -> None:
        asked = [world.sample("a", 100), world.sample("b", 100)]
        await asyncio.sleep(40 * TOKENS_PER_ID * 0.01)
        assert world.pool.num_lost == 0
        world.engines[0].die("killed")
        for answer in await asyncio.gather(*asked):
            assert len(answer.token_ids) == len(answer.logprobs) == 100
            assert sum(span.num_tokens for span in answer.spans) == 100
        # Of the 40 ids that had been sampled there, at most the one in work is sampled again.
        moved = world.engines[1].num_tokens_written - 100 * TOKENS_PER_ID
        assert moved <= 61 * TOKENS_PER_ID
        assert world.pool.servers[0].state is ServerState.LOST
        assert "killed" in world.pool.servers[0].reason
        assert world.pool.num_lost == 1

    in_world(main)


def test_each_server_that_a_call_came_to_is_told_of_with_its_part() -> None:
    async def main(world: World) -> None:
        asked = world.sample("a", 100)
        await asyncio.sleep(40 * TOKENS_PER_ID * 0.01)
        world.engines[0].die("killed")
        await asked
        first, second = world.ends
        assert (first.server, second.server) == ("server-0", "server-1")
        assert "killed" in first.error
        assert not second.error
        assert 39 <= first.num_completion_tokens <= 40
        assert first.num_completion_tokens + second.num_completion_tokens == 100
        assert second.num_prompt_tokens == first.num_prompt_tokens + first.num_completion_tokens
        assert first.sent_s < first.ended_s <= second.sent_s < second.ended_s

    in_world(main)


def test_a_call_that_is_canceled_is_told_of() -> None:
    async def main(world: World) -> None:
        asked = world.sample("a", 100)
        await asyncio.sleep(10 * TOKENS_PER_ID * 0.01)
        asked.cancel()
        await asyncio.wait([asked])
        (end,) = world.ends
        assert (end.error, end.num_completion_tokens) == ("canceled", 0)

    in_world(main)


async def lost_after_an_update(world: World) -> "asyncio.Task[Any]":
    """Return a request that weights 1 and 2 have sampled a part of, whose server has just died."""
    await world.publisher.connect()
    await world.publisher.publish(1)
    asked = world.sample("a", 100)
    await asyncio.sleep(30 * TOKENS_PER_ID * 0.01)
    await world.publisher.publish(2)
    await asyncio.sleep(30 * TOKENS_PER_ID * 0.01)
    world.engines[0].die("killed")
    return asked


def test_a_call_over_an_update_says_which_weights_began_each_part() -> None:
    async def main(world: World) -> None:
        asked = await lost_after_an_update(world)
        await asked
        assert [end.version for end in world.ends] == [1, 2]

    in_world(main)


def test_tokens_keep_the_version_that_sampled_them() -> None:
    async def main(world: World) -> None:
        asked = await lost_after_an_update(world)
        await world.publisher.publish(3)
        answer = await asked
        assert [span.version for span in answer.spans] == [1, 2, 3]
        assert sum(span.num_tokens for span in answer.spans) == len(answer.token_ids) == 100
        assert (answer.oldest_version, answer.newest_version) == (1, 3)

    in_world(main)


def test_requests_that_an_update_ends_go_on_under_the_new_weights() -> None:
    async def main(world: World) -> None:
        publisher = WeightPublisher(world.pool, world.ranks, in_flight="abort")
        await publisher.connect()
        await publisher.publish(1)
        asked = [world.sample(name, 50) for name in "abc"]
        await asyncio.sleep(20 * TOKENS_PER_ID * 0.01)
        await publisher.publish(2)
        for answer in await asyncio.gather(*asked):
            assert [span.version for span in answer.spans] == [1, 2]
            assert sum(span.num_tokens for span in answer.spans) == len(answer.token_ids) == 50
        assert [server.state for server in world.pool.servers] == ["serving", "serving"]
        assert [engine.num_running for engine in world.engines] == [0, 0]

    in_world(main)


def test_requests_wait_for_the_only_server_and_it_serves_the_present_weights() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        await world.publisher.publish(4)

        async def work() -> None:
            asked = world.sample("a", 10)
            await asyncio.sleep(1.0)
            world.engines[0].die("killed")
            assert (await asked).spans[-1].version == 4
            assert (await world.sample("b", 3)).spans[0].version == 4

        told = await world.supervising(work(), start_s=40.0)
        assert asyncio.get_running_loop().time() > 40.0
        assert world.states(0)[-4:] == ["lost", "starting", "loading", "serving"]
        assert world.pool.servers[0].life == 2
        assert ["killed" in line for line in told] == [True, False]

    in_world(main, num_servers=1)


def test_without_a_supervisor_the_last_loss_is_the_callers() -> None:
    async def main(world: World) -> None:
        asked = world.sample("a", 10)
        await asyncio.sleep(0.1)
        world.engines[0].die("killed")
        with pytest.raises(ServerLostError, match="killed"):
            await asked
        with pytest.raises(EndpointLostError, match=r"no inference server is left: .*killed"):
            await world.sample("b", 1)

    in_world(main, num_servers=1, is_kept=False)


def test_what_an_earlier_life_says_changes_nothing() -> None:
    async def main(world: World) -> None:
        server = world.pool.servers[0]
        world.pool.lose(server, "killed")
        server.become(ServerState.STARTING)
        world.pool.lose(server, "a late answer", life=1)
        assert server.state is ServerState.STARTING
        world.pool.lose(server, "it died at its start", life=2)
        assert server.state is ServerState.LOST

    in_world(main)


def test_states_follow_the_drawn_machine_alone() -> None:
    async def main(world: World) -> None:
        for before, after in itertools.product(ServerState, ServerState):
            server = Server(world.clients[0])
            server.state = before
            if after is before or after in _NEXT[before]:
                server.become(after)
                assert server.state is after
            else:
                with pytest.raises(AssertionError, match=f"cannot be {after} after {before}"):
                    server.become(after)

    in_world(main)


@pytest.mark.parametrize("delay_s", [0.0005, 0.0015, 0.003, 0.1, 0.45, 0.5015, 0.503, 0.505])
def test_a_server_that_dies_in_an_update_is_left_out_of_it(delay_s: float) -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        publishing = asyncio.create_task(world.publisher.publish(1))
        await asyncio.sleep(delay_s)
        world.engines[1].die("killed")
        await publishing
        await world.publisher.publish(2)
        assert world.pool.version == world.engines[0].version == 2
        assert world.pool.servers[1].state is ServerState.LOST
        assert (await world.sample("a", 5)).spans[0].version == 2

    in_world(main)


def test_an_update_that_no_server_survives_is_live_on_those_that_come_back() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            for engine in world.engines:
                engine.die("killed")
            await world.publisher.publish(7)
            assert (await world.sample("a", 5)).spans[0].version == 7
            await world.publisher.publish(8)
            assert [engine.version for engine in world.engines] == [8, 8]

        await world.supervising(work())

    in_world(main)


def test_a_server_that_comes_back_before_a_publish_gets_its_weights() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            world.engines[1].die("killed")
            await world.publisher.weights_change()
            await asyncio.sleep(100.0)
            # It is healthy, but the weights that the ranks have now are not those of version 0.
            assert world.pool.servers[1].state is ServerState.LOADING
            assert not world.pool.servers[1].takes_requests
            await world.publisher.publish(1)
            assert world.pool.servers[1].state is ServerState.SERVING
            assert world.engines[1].version == 1

        await world.supervising(work())

    in_world(main)


def test_a_server_that_holds_other_weights_is_lost_and_says_which() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        world.clients[1].corrupts = lambda: True
        await world.publisher.publish(1)
        assert [server.state for server in world.pool.servers] == ["serving", "lost"]
        assert world.pool.servers[1].reason == (
            "it holds other weights than were sent: 1 of 1 tensors differ: weights"
        )

    in_world(main)


def test_a_server_that_hangs_is_lost_and_its_requests_go_on() -> None:
    async def main(world: World) -> None:
        async def work() -> None:
            asked = [world.sample(name, 20) for name in "abcd"]
            await asyncio.sleep(1.0)
            world.engines[0].hang()
            assert [len((await one).token_ids) for one in asked] == [20] * 4

        told = await world.supervising(work(), progress_s=30.0)
        assert "it hangs: it was silent for 30 s" in told[0]

    in_world(main)


def test_a_server_that_never_starts_is_given_up_and_the_run_goes_on_with_the_others() -> None:
    async def main(world: World) -> None:
        async def work() -> None:
            world.engines[0].die("killed")
            await world.pool.servers[0].until(ServerState.GIVEN_UP)
            assert len((await world.sample("a", 5)).token_ids) == 5

        told = await world.supervising(work(), failed_starts=10**6, start_s=1.0)
        assert len(told) == MOST_RESTARTS + 1
        assert "is given up, and the run goes on without it" in told[-1]

    in_world(main)


def test_a_run_ends_with_its_last_server_and_says_why() -> None:
    async def main(world: World) -> None:
        async def work() -> None:
            for engine in world.engines:
                engine.die("killed")
            await asyncio.Event().wait()

        with pytest.raises(ProcessDiedError, match=rf"\b{MOST_RESTARTS + 1} times"):
            await world.supervising(work(), failed_starts=10**6, start_s=1.0)
        assert {server.state for server in world.pool.servers} <= {
            ServerState.GIVEN_UP,
            ServerState.STARTING,
            ServerState.LOST,
        }

    in_world(main)


def test_losses_long_ago_are_not_held_against_a_server() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            for _ in range(2 * MOST_RESTARTS):
                world.engines[0].die("killed")
                await asyncio.sleep(GOOD_LIFE_S + 100.0)
            assert world.pool.servers[0].state is ServerState.SERVING

        await world.supervising(work())

    in_world(main)


def test_a_server_that_served_before_it_had_weights_would_be_noticed(monkeypatch) -> None:
    """The check of the tests above: without the weights, the version of the tokens is another."""

    async def main(world: World) -> None:
        await world.publisher.connect()
        await world.publisher.publish(4)

        async def serve(server: Server) -> None:
            world.pool.serve(server, 4)

        monkeypatch.setattr(world.publisher, "bring_in", serve)

        async def work() -> None:
            world.engines[0].die("killed")
            assert (await world.sample("a", 3)).spans[0].version == 0

        await world.supervising(work())

    in_world(main, num_servers=1)


def test_requests_that_wait_for_a_server_that_never_comes_are_a_deadlock() -> None:
    async def main(world: World) -> None:
        world.engines[0].die("killed")
        await world.sample("a", 3)

    with pytest.raises(Deadlock):
        in_world(main, num_servers=1)
