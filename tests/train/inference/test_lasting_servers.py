"""Faults of single servers that end neither the run nor the server, and those that must end one."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from tests.train.inference.test_servers import World, in_world

from telescope_core.errors import ConfigError, EndpointError, ProcessDiedError
from telescope_core.records.servers import ServerState
from telescope_train.backends.protocol import RankDiedError, TransferError
from telescope_train.cluster.network import Network
from telescope_train.inference import fleet
from telescope_train.inference.fleet import ServerGroup, ServerHandle, ServerPorts, Startup
from telescope_train.inference.server import ServerSettings
from telescope_train.inference.servers import CONTROL_DEADLINE_S, Loss, Reached, ServerDiedError
from telescope_train.inference.supervisor import MOST_RESTARTS
from telescope_train.simulation.trainer import TrainerSpeed
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.weights.publish import LEFT_ALONE_S, MOST_SPOILED

JOIN, UPDATE = "/init_weight_transfer_engine", "/update_weights"


def answers_with_errors(world: World, server: int, path: str) -> list[float]:
    """Make a living server refuse a call; returns the times at which it does."""
    client = world.clients[server]
    control = client.control
    refused: list[float] = []

    async def refusing(asked: str, body: Any = None, **options: Any) -> Any:
        if asked == path:
            refused.append(asyncio.get_running_loop().time())
            raise EndpointError("answered HTTP 500: it will not")
        return await control(asked, body, **options)

    client.control = refusing  # type: ignore[method-assign]
    return refused


def takes_longer(world: World, server: int, seconds: float) -> None:
    """Make a server answer only so many seconds after it has been sent the weights."""
    client = world.clients[server]
    control = client.control

    async def late(path: str, body: Any = None, **options: Any) -> Any:
        deadline_s = options.pop("deadline_s", CONTROL_DEADLINE_S)
        async with asyncio.timeout(deadline_s):
            if path == UPDATE:
                await asyncio.sleep(seconds)
            return await control(path, body, **options)

    client.control = late  # type: ignore[method-assign]


def test_a_server_that_cannot_join_is_given_up_and_the_run_goes_on() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            answers_with_errors(world, 0, JOIN)
            world.engines[0].die("killed")
            await world.pool.servers[0].until(ServerState.GIVEN_UP)
            assert "it will not" in world.pool.servers[0].reason
            await world.publisher.publish(1)
            assert (await world.sample("a", 5)).spans[0].version == 1

        await world.supervising(work(), start_s=1.0)

    in_world(main)


@pytest.mark.parametrize("path", [JOIN, UPDATE])
def test_a_living_server_that_spoils_updates_is_lost_and_the_others_get_theirs(path: str) -> None:
    async def main(world: World) -> None:
        if path == UPDATE:
            await world.publisher.connect()
        refused = answers_with_errors(world, 1, path)
        await world.publisher.publish(1)
        assert len(refused) == MOST_SPOILED
        states = [server.state for server in world.pool.servers]
        assert states == [ServerState.SERVING, ServerState.LOST, ServerState.SERVING]
        assert [engine.version for engine in world.engines] == [1, 0, 1]

    in_world(main, num_servers=3)


def test_a_server_that_dies_or_spoils_the_first_group_is_left_out_and_comes_back() -> None:
    async def main(world: World) -> None:
        world.engines[0].die("killed at the start")
        answers_with_errors(world, 1, JOIN)

        async def work() -> None:
            await world.publisher.connect()
            assert world.pool.servers[2].state is ServerState.SERVING
            await world.pool.servers[0].until(ServerState.SERVING)
            await world.publisher.publish(1)
            assert [engine.version for engine in world.engines][::2] == [1, 1]

        await world.supervising(work(), start_s=1.0)

    in_world(main, num_servers=3)


def test_a_group_that_no_living_server_joins_ends_the_run_at_once() -> None:
    async def main(world: World) -> None:
        for index in range(2):
            answers_with_errors(world, index, JOIN)
        with pytest.raises(TransferError):
            await world.publisher.connect()
        assert asyncio.get_running_loop().time() < CONTROL_DEADLINE_S, "nothing is waited for"
        assert {server.state for server in world.pool.servers} == {ServerState.LOST}

    in_world(main)


def test_a_server_that_comes_back_when_a_rank_dies_waits_for_the_new_ranks() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        send = world.ranks.send_weights

        async def dies() -> str:
            world.ranks.send_weights = send  # type: ignore[method-assign]
            raise RankDiedError("trainer rank 1 died")

        async def work() -> None:
            world.ranks.send_weights = dies  # type: ignore[method-assign]
            world.engines[0].die("killed")
            await world.pool.servers[0].until(ServerState.LOADING)
            await asyncio.sleep(60.0)
            assert world.pool.servers[0].state is ServerState.LOADING
            await world.publisher.restore(0)
            assert world.pool.servers[0].state is ServerState.SERVING
            assert world.pool.servers[0].life == 2

        await world.supervising(work(), start_s=1.0)

    in_world(main)


def test_a_transfer_may_take_as_long_as_it_moves() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        slow_s = 10 * CONTROL_DEADLINE_S
        world.ranks.speed = TrainerSpeed(send_s=slow_s)
        for index in range(2):
            takes_longer(world, index, slow_s + 1.0)
        await world.publisher.publish(1)
        assert [server.state for server in world.pool.servers] == [ServerState.SERVING] * 2
        assert asyncio.get_running_loop().time() > slow_s

    in_world(main)


def test_a_server_that_is_silent_after_everything_was_sent_is_lost() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        takes_longer(world, 1, 10**6)
        await world.publisher.publish(1)
        server = world.pool.servers[1]
        assert server.state is ServerState.LOST
        assert server.reason.startswith("everything has been sent")
        now_s = asyncio.get_running_loop().time()
        assert CONTROL_DEADLINE_S < now_s < CONTROL_DEADLINE_S + LEFT_ALONE_S

    in_world(main)


def test_a_death_where_updates_begin_costs_no_other_server() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        begun: set[int] = set()
        for number, client in enumerate(world.clients):
            control = client.control

            async def strict(
                path: str, body: Any = None, *, number=number, control=control, **options: Any
            ) -> Any:
                if path == "/start_weight_update":
                    if number == 1:
                        world.engines[1].die("killed")
                    elif number in begun:
                        raise EndpointError("HTTP 500: an update is going on")
                    begun.add(number)
                if path == "/finish_weight_update":
                    begun.discard(number)
                return await control(path, body, **options)

            client.control = strict  # type: ignore[method-assign]
        await world.publisher.publish(1)
        states = [server.state for server in world.pool.servers]
        assert states == [ServerState.SERVING, ServerState.LOST, ServerState.SERVING]

    in_world(main, num_servers=3)


def test_a_server_that_serves_between_kills_is_never_given_up() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            for kill in range(20):
                if kill % 2:
                    await world.publisher.publish(kill)
                else:
                    await world.sample(f"rollout {kill}", 3)
                world.engines[0].die("killed")
                await world.pool.servers[0].until(ServerState.SERVING)

        told = await world.supervising(work(), start_s=1.0)
        # Without a pause before it is started again: these were no losses in a row.
        assert asyncio.get_running_loop().time() < 100
        assert all(f"1 of {MOST_RESTARTS}" in line for line in told if "started again" in line)

    in_world(main, num_servers=1)


def test_tokens_of_a_request_that_goes_on_elsewhere_are_service_too() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            asked = world.sample("long", 2000)
            for _ in range(2 * MOST_RESTARTS):
                await asyncio.sleep(60.0)
                world.engines[0].die("killed")
            await asked

        await world.supervising(work(), start_s=1.0)

    in_world(main, num_servers=1)


def test_a_server_that_dies_before_it_serves_is_given_up_after_pauses_that_grow() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()

        async def work() -> None:
            for life in range(1, MOST_RESTARTS + 2):
                assert world.pool.servers[1].life == life
                world.engines[1].die("killed")
                await world.pool.servers[1].until(ServerState.LOST)
                if life <= MOST_RESTARTS:
                    await world.pool.servers[1].until(ServerState.SERVING)
            await world.pool.servers[1].until(ServerState.GIVEN_UP)

        told = await world.supervising(work(), start_s=1.0)
        assert "is given up, and the run goes on without it" in told[-1]
        began_s = [one.time_s for one in world.events if one.state is ServerState.STARTING]
        assert len(began_s) == MOST_RESTARTS
        assert asyncio.get_running_loop().time() > 67

    in_world(main)


class ScriptedHandle(ServerHandle):
    """A server whose actor says what a test plans."""

    def __init__(self, says: Callable[[str], Any], place: Path) -> None:
        settings = ServerSettings(model_path="none", port=1, log_path=place / "inference.log")
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "_says", says)

    async def until_started(self, within_s: float) -> None:
        pass

    async def ask(self, question: str) -> Any:
        await asyncio.sleep(0.5)
        return self._says(question)  # type: ignore[attr-defined]


def group_of(place: Path, *says: Callable[[str], Any]) -> ServerGroup:
    handles = [ScriptedHandle(one, place) for one in says]
    return ServerGroup(handles, silence_s=300.0, progress_s=120.0)


def healthy(question: str) -> Startup:
    reached = Reached("http://127.0.0.1:1", "aaaa")
    return Startup(is_healthy=True, log_bytes=1, reached=reached, activity="warming up")


def dies(question: str) -> Startup:
    raise ProcessDiedError("it died of SIGKILL")


def test_a_server_that_does_not_start_is_named_and_the_others_begin(tmp_path: Path) -> None:
    async def main() -> None:
        group = group_of(tmp_path, dies, healthy, dies)
        failed = await group.wait_until_healthy(num_needed=2)
        assert failed == {0: "it died of SIGKILL", 2: "it died of SIGKILL"}
        # Evals alone are no run.
        with pytest.raises(ProcessDiedError, match="SIGKILL"):
            await group_of(tmp_path, dies, healthy).wait_until_healthy(num_needed=1)

    run_in_virtual_time(main)


def test_a_server_is_ended_by_its_actor_or_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        asked: list[str] = []
        killed: list[Any] = []
        monkeypatch.setattr(fleet.ray, "kill", killed.append)
        group = group_of(tmp_path, asked.append, dies)
        object.__setattr__(group.servers[1], "actor", "that of server 1")
        await group.end(0)
        assert (asked, killed) == (["close"], [])
        await group.end(1)
        assert killed == ["that of server 1"]

    run_in_virtual_time(main)


def test_only_the_engine_s_own_signs_of_life_count(tmp_path: Path) -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop()
        group = group_of(tmp_path, lambda question: clock.time() < 1000)
        # Its tokens go on for longer than its answers.
        why = await group.until_lost(0, lambda: min(clock.time(), 2000))
        assert why.reason.startswith("it hangs: for 12")
        assert 2120 < clock.time() < 2125

    run_in_virtual_time(main)


class Actor:
    """Stands for Ray's handle of an actor, which answers at `answers_s`."""

    def __init__(
        self, *, moves_until_s: float = 0.0, answers_s: float = math.inf, cut_s: float = 0.0
    ) -> None:
        self._moves_until_s, self._answers_s, self._cut_s = moves_until_s, answers_s, cut_s
        self.signs_of_life = SimpleNamespace(remote=self._signs)
        self.start_again = self.__ray_ready__ = SimpleNamespace(remote=self._answer)

    async def _signs(self) -> int:
        self._require_connection()
        return int(min(asyncio.get_running_loop().time(), self._moves_until_s))

    async def _answer(self) -> str:
        self._require_connection()
        loop = asyncio.get_running_loop()
        if self._answers_s == math.inf:
            await asyncio.Event().wait()
        await asyncio.sleep(max(0.0, self._answers_s - loop.time()))
        return "done"

    def _require_connection(self) -> None:
        if asyncio.get_running_loop().time() < self._cut_s:
            raise ActorUnavailableError("the connection is reset", b"ab" * 8)


def handle_of(actor: Actor, place: Path, *, starts_until_s: float = 0.0) -> ServerHandle:
    settings = ServerSettings(model_path="none", port=1, log_path=place / "inference.log")
    ports = ServerPorts(network=Network(is_local=True))
    return ServerHandle(
        settings=settings,
        ports=ports,
        place={},
        actor=actor,
        progress_s=10.0,
        look=lambda: min(asyncio.get_running_loop().time(), starts_until_s),
    )


def test_an_actor_may_take_any_time_as_long_as_it_moves_on(tmp_path: Path) -> None:
    async def main() -> None:
        slow = handle_of(Actor(moves_until_s=5000.0, answers_s=5000.0), tmp_path)
        assert await slow.ask("start_again") == "done"
        assert asyncio.get_running_loop().time() >= 5000

    run_in_virtual_time(main)


def test_an_actor_that_stands_still_is_dead(tmp_path: Path) -> None:
    async def main() -> None:
        stuck = handle_of(Actor(moves_until_s=95.0), tmp_path)
        with pytest.raises(
            ProcessDiedError, match=r"no progress for 10 s; .* raise inference_progress_timeout_s"
        ):
            await stuck.ask("start_again")
        assert 95 < asyncio.get_running_loop().time() < 95 + 3 * 10

    run_in_virtual_time(main)


def test_an_actor_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    async def main() -> None:
        back = handle_of(Actor(cut_s=30.0, answers_s=0.0), tmp_path)
        assert await back.ask("start_again") == "done"
        assert asyncio.get_running_loop().time() >= 30
        gone = handle_of(Actor(cut_s=math.inf), tmp_path)
        with pytest.raises(ProcessDiedError, match=r"connection to the actor .* was lost"):
            await gone.ask("start_again")

    run_in_virtual_time(main)


def test_an_actor_that_does_not_start_is_named_with_its_limit(tmp_path: Path) -> None:
    async def main() -> None:
        group = ServerGroup([handle_of(Actor(), tmp_path)], silence_s=1.0, progress_s=1.0)
        with pytest.raises(ProcessDiedError, match=r"not start, .* for 300 s .*ray_placement_time"):
            await group.wait_until_healthy(num_needed=1)
        assert asyncio.get_running_loop().time() < 310

    run_in_virtual_time(main)


def test_an_actor_may_take_any_time_to_start_while_the_cluster_does_something(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        slow = handle_of(Actor(answers_s=5000.0), tmp_path, starts_until_s=4900.0)
        await slow.until_started(300.0)
        assert asyncio.get_running_loop().time() >= 5000
        with pytest.raises(TimeoutError):
            await handle_of(Actor(), tmp_path, starts_until_s=9000.0).until_started(300.0)
        assert 9300 <= asyncio.get_running_loop().time() < 9310

    run_in_virtual_time(main)


def test_a_restart_that_is_refused_for_any_reason_does_not_end_the_run(tmp_path: Path) -> None:
    async def main(world: World) -> None:
        class Fleet:
            async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
                return Loss(await world.engines[index].until_in_trouble())

            async def start_again(self, index: int) -> Reached:
                raise ConfigError("no port is free")

        async def work() -> None:
            world.engines[0].die("killed")
            await world.pool.servers[0].until(ServerState.GIVEN_UP)
            assert "no port is free" in world.pool.servers[0].reason
            assert len((await world.sample("a", 3)).token_ids) == 3

        await world.supervising(work(), fleet=Fleet())

    in_world(main)


class DyingFleet:
    """Servers that die as they start, each time of what is planned next."""

    def __init__(self, world: World, causes: list[str]) -> None:
        self.world, self.causes = world, causes

    async def until_lost(self, index: int, heard_s: Callable[[], float]) -> Loss:
        await self.world.engines[index].until_in_trouble()
        return Loss(f"it died of {self.causes[0]}", self.causes.pop(0))

    async def start_again(self, index: int) -> Reached:
        error = ServerDiedError(f"it died of {self.causes[0]}")
        error.cause = self.causes.pop(0)
        raise error


def test_two_deaths_of_one_cause_before_any_token_end_the_run() -> None:
    """Whatever ends it will end it again. Numbers that differ, such as addresses, say nothing."""

    async def main(world: World) -> None:
        async def work() -> None:
            world.engines[0].die("no head of 16")
            await asyncio.Event().wait()

        causes = ["ValueError: head of 16 at 0x1a", "ValueError: head of 16 at 0x2b"]
        with pytest.raises(ProcessDiedError, match=r"twice in a row.*one cause.*head of 16"):
            await world.supervising(work(), fleet=DyingFleet(world, causes))
        lives = [one for one in world.events if one.state is ServerState.STARTING]
        assert [one.reason for one in lives] == ["it died of ValueError: head of 16 at 0x1a"]
        assert asyncio.get_running_loop().time() < 10

    in_world(main, num_servers=1)


@pytest.mark.parametrize("causes", [["A: a", "B: b"] * 3, [""] * 6])
def test_deaths_of_several_causes_or_of_none_are_tried_again(causes: list[str]) -> None:
    async def main(world: World) -> None:
        async def work() -> None:
            world.engines[0].die("it was killed")
            await asyncio.Event().wait()

        with pytest.raises(ProcessDiedError, match=rf"{MOST_RESTARTS + 1} times in a row"):
            await world.supervising(work(), fleet=DyingFleet(world, causes))

    in_world(main, num_servers=1)


def test_a_death_while_a_server_waits_for_weights_is_noticed_then() -> None:
    async def main(world: World) -> None:
        await world.publisher.connect()
        server = world.pool.servers[0]

        async def work() -> None:
            await world.publisher.weights_change()
            for life in (2, 3):
                world.engines[0].die("killed")
                await server.until(ServerState.STARTING)
                await server.until(ServerState.LOADING)
                assert server.life == life
            await world.publisher.publish(1)
            assert server.state is ServerState.SERVING
            assert server.life == 3

        await world.supervising(work(), start_s=1.0)

    in_world(main)
