"""Evals beside training, in virtual time: pinned versions, no delays, and losses of servers."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.fleet import SimulatedFleet
from tests.train.simulated_config import small_batches

from telescope_core.records import RunFolder
from telescope_core.records.eval_points import EvalPoint, EvalPointState
from telescope_core.records.restarts import Restart
from telescope_core.records.servers import ServerEvent, ServerRole, ServerState
from telescope_core.records.timeline import ModelCall
from telescope_core.types import Sampling
from telescope_train.backends.protocol import TransferError
from telescope_train.backends.transfer import Place
from telescope_train.cluster.supervision import supervised
from telescope_train.config.eval_folders import AFTER, BEFORE
from telescope_train.evals.beside import AfterEvals, EvalsBeside, LiveEvals
from telescope_train.evals.servers import EvalCalls, EvalServers
from telescope_train.inference.generation import ServerLostError
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import Server
from telescope_train.inference.supervisor import Supervisor
from telescope_train.loop import train
from telescope_train.observability.calls import CallLog
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.environments import SimulatedEnvironment, Workload, lognormal
from telescope_train.simulation.run import History, Scenario, SimulatedRun
from telescope_train.simulation.servers import ServerTimes, SimulatedClient, SimulatedPolicy
from telescope_train.simulation.virtual_time import run_in_virtual_time
from telescope_train.weights.publish import OTHERS_WAIT_S, WeightPublisher

DONE, MIXED = EvalPointState.DONE, EvalPointState.MIXED
SHORT = Workload(lengths=lognormal(400, 0.5))
LONG = Workload(lengths=lognormal(20_000, 0.2))


def scenario(*, steps: int = 8, every: int = 2, samples: int = 8, **settings: Any) -> Scenario:
    held_out = {"name": "held-out", "eval_every": every, "num_samples": samples, "rollouts": 2}
    config = small_batches(steps=steps, evals={"evals": [held_out]})
    return Scenario(config=config, workload=SHORT, num_servers=2, num_ranks=1, **settings)


class OfEvals:
    """Gives each attempt of an eval a policy that asks the servers of evals."""

    def __init__(self, servers: EvalServers) -> None:
        self._servers = servers
        self.calls: list[ModelCall] = []

    def policy(self, rollout_id: str, sampling: Sampling | None = None) -> SimulatedPolicy:
        calls = EvalCalls(self._servers, CallLog(self.calls.append), rollout_id)
        return SimulatedPolicy(calls, rollout_id)

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class World:
    """A simulated run with evals; inside the loop."""

    folder: RunFolder
    scenario: Scenario
    num_own: int = 0
    concurrency: int = 64
    workload: Workload = SHORT
    told: list[str] = field(default_factory=list)
    step_ends_s: list[float] = field(default_factory=list)
    tracked: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> the numbers that trackers get of it; results of evals reach them by themselves."""

    def __post_init__(self) -> None:
        self.run = SimulatedRun(self.scenario, History())
        run, engine = self.run, self.scenario.engine
        self.own_engines = [SimulatedEngine(engine, name=f"eval-{n}") for n in range(self.num_own)]
        clients = [
            SimulatedClient(e, ServerTimes(), lambda: run.ranks.digest) for e in self.own_engines
        ]
        own = ServerPool(clients, role=ServerRole.EVAL) if clients else None
        self.servers = EvalServers(run.pool, own)
        self.publisher = WeightPublisher(
            run.pool, run.ranks, in_flight="pause", others=[own] if own else []
        )
        run.publisher = self.publisher
        self.policies = OfEvals(self.servers)
        live = LiveEvals(
            config=self.scenario.config,
            environments={"held-out": SimulatedEnvironment(self.workload, name="held-out")},
            policies=self.policies,
            folder=self.folder,
            concurrency=self.concurrency,
        )
        self.evals = EvalsBeside(live, self.servers, self.publisher, show=self.told.append)

    async def train(self, first_version: int = 0) -> None:
        parts = await self.run.parts(first_version)
        parts = replace(
            parts,
            publisher=AfterEvals(publisher=self.publisher, evals=self.evals),
            take_counts=self.evals.take_counts,
            take_known=self.evals.take_known,
        )

        async def after_step(step: int, row: dict[str, float]) -> None:
            self.step_ends_s.append(asyncio.get_running_loop().time())
            self.tracked[step] = row
            await self.evals.after_step(step)

        try:
            await self.evals.go_on(first_version)
            await train(parts, after_step=after_step)
            await self.evals.finish()
        finally:
            await self.evals.close()
            await parts.sampler.close()

    @property
    def points(self) -> list[EvalPoint]:
        return self.folder.eval_points()


def in_world(main, tmp_path: Path, **options: Any) -> World:
    folder = RunFolder.create(tmp_path / "run", config={})

    async def run() -> World:
        world = World(folder, options.pop("scenario", scenario()), **options)
        await main(world)
        return world

    return run_in_virtual_time(run)


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - the clock is virtual
        await asyncio.sleep(0.1)


def assert_pinned(points: list[EvalPoint]) -> None:
    for point in points:
        assert (point.state, point.reason) == (DONE, "")
        assert point.versions == (point.version,)
        assert point.num_scored == 16


def test_on_shared_servers_every_token_is_of_the_version_evaluated(tmp_path):
    world = in_world(World.train, tmp_path, workload=LONG)
    assert [point.tag for point in world.points] == ["step-2", "step-4", "step-6", "step-8"]
    assert_pinned(world.points)
    assert {point.lag_steps for point in world.points} == {0}
    assert len(world.run.history.rows) == 8
    # The trainer goes on beside the eval, and only the weights wait for it.
    waited = [row["time/sync_s"] for row in world.run.history.rows]
    assert min(waited[2], waited[4]) > 5 * max(waited[0], waited[1], waited[3])


def test_times_stay_in_order_when_the_clock_of_the_machine_is_set_back(tmp_path, monkeypatch):
    real_s, back_s = time.time(), itertools.count(0, 3600)
    monkeypatch.setattr(time, "time", lambda: real_s - next(back_s))
    events: list[ServerEvent] = []

    async def main(world: World) -> None:
        server = Server(world.run.pool.servers[0].client, on_event=events.append)
        server.become(ServerState.UPDATING)
        server.become(ServerState.SERVING)
        await world.train()

    world = in_world(main, tmp_path)
    points = [point.time_s for point in world.points]
    rows = [row["time_s"] for row in world.tracked.values()]
    servers = [event.time_s for event in events]
    assert (len(points), len(rows), len(servers)) == (4, 8, 2)
    for times in (points, rows, servers):
        assert times == sorted(times)
    everything = [*points, *rows, *servers]
    assert max(everything) - min(everything) < 3600


def test_a_rollout_of_an_eval_that_fails_is_played_again_and_its_calls_say_so(tmp_path):
    world = in_world(World.train, tmp_path, workload=replace(SHORT, failure_rate=0.3))
    assert len(world.run.history.rows) == 8
    assert [point.state for point in world.points] == [DONE] * 4
    # Some fail in every attempt that they have.
    assert min(point.num_scored for point in world.points) > 8
    calls = world.policies.calls
    assert {call.index for call in calls} == {0, 1}
    assert max(call.attempt for call in calls) > 1
    assert all(call.group_id.startswith("eval-") for call in calls)


def test_servers_of_their_own_hold_a_version_while_training_goes_on(tmp_path):
    quiet = in_world(World.train, tmp_path / "quiet", scenario=scenario(every=0), num_own=1)
    world = in_world(World.train, tmp_path, num_own=1, workload=LONG)
    done = [point for point in world.points if point.state is DONE]
    assert_pinned(done)
    assert done[0].version == 2
    assert done[0].lag_steps >= 2
    assert f", {done[0].lag_steps} steps later" in world.told[-1] or len(done) > 1
    skipped = [point for point in world.points if point.state is EvalPointState.SKIPPED]
    assert skipped
    assert skipped[0].tag == "step-4"
    assert skipped[0].reason == "the evals of step-2 were still going on"
    assert sorted(point.version for point in world.points) == [2, 4, 6, 8]
    # A transfer to the servers of evals is all that may stand in the way of a step.
    assert world.step_ends_s[-1] < quiet.step_ends_s[-1] + 4 * 2.0
    assert all(engine.num_tokens_written for engine in world.own_engines)


def test_evals_that_are_fast_enough_skip_nothing(tmp_path):
    tiny = Workload(lengths=lognormal(20, 0.1))
    world = in_world(World.train, tmp_path, num_own=2, workload=tiny)
    assert [point.version for point in world.points] == [2, 4, 6, 8]
    assert_pinned(world.points)


def test_a_round_whose_servers_are_lost_fails_and_training_goes_on(tmp_path):
    async def main(world: World) -> None:
        async def kill() -> None:
            await until(lambda: world.own_engines[0].num_running > 0)
            world.own_engines[0].die("killed")

        await asyncio.gather(world.train(), kill())

    world = in_world(main, tmp_path, num_own=1, workload=LONG)
    assert len(world.run.history.rows) == 8
    first, *later = world.points
    assert first.state is EvalPointState.FAILED
    assert "killed" in first.reason
    assert {point.state for point in later} == {EvalPointState.SKIPPED}
    assert "no server for evals answers: lost the inference server: killed" in later[-1].reason


def test_an_eval_server_that_comes_back_gets_the_weights_of_the_next_evals(tmp_path):
    async def main(world: World) -> None:
        async def lose_it() -> None:
            await until(lambda: world.own_engines[0].num_running > 0)
            world.own_engines[0].die("killed")

        own = world.servers.own
        assert own is not None

        async def until_serving(server) -> None:
            await server.until(ServerState.SERVING, ServerState.LOST)

        fleet = SimulatedFleet([*world.run.engines, *world.own_engines], start_s=1.0)
        supervisor = Supervisor(own, fleet, until_serving, first=2, is_needed=False)

        async def work() -> None:
            await asyncio.gather(world.train(), lose_it())

        await supervised(work(), [supervisor.run()], grace_s=0.0)

    world = in_world(main, tmp_path, num_own=1, workload=SHORT)
    first, *later = world.points
    assert first.state is EvalPointState.FAILED
    assert_pinned(later)
    assert later


def test_weights_do_not_wait_for_an_eval_whose_only_server_waits_for_them(tmp_path):
    async def main(world: World) -> None:
        async def lose_it() -> None:
            # The trainer has begun step 3 while the evals of step 2 go on.
            await until(lambda: world.run.ranks.num_steps >= 3)
            for engine in world.run.engines:
                engine.die("killed")

        fleet = SimulatedFleet(world.run.engines, start_s=1.0)
        supervisor = Supervisor(world.run.pool, fleet, world.publisher.bring_in)

        async def work() -> None:
            await asyncio.gather(world.train(), lose_it())

        await supervised(work(), [supervisor.run()], grace_s=0.0)

    one = replace(scenario(), num_servers=1, fleet=lambda engines: SimulatedFleet(engines))
    world = in_world(main, tmp_path, scenario=one, workload=LONG)
    assert len(world.run.history.rows) == 8
    first = world.points[0]
    assert (first.version, first.state) == (2, MIXED)
    assert first.versions[0] == 2
    assert len(first.versions) > 1
    assert first.reason == f"tokens are of the weights {', '.join(map(str, first.versions))}"
    assert first.reason in world.told[0]


def test_a_resumed_run_plays_the_evals_that_it_was_stopped_in(tmp_path):
    async def stopped(world: World) -> None:
        training = asyncio.create_task(world.train())
        await until(lambda: world.own_engines[0].num_running > 0)
        training.cancel()
        await asyncio.wait([training])

    world = in_world(stopped, tmp_path, num_own=1, workload=LONG)
    (stopped_point,) = world.points
    assert stopped_point.state is EvalPointState.FAILED
    assert stopped_point.reason == "it was stopped with the steps that it was beside"
    assert stopped_point.folder == "held-out-step-2"
    assert (world.folder.evals_path / stopped_point.folder).is_dir()

    async def go_on() -> World:
        again = World(world.folder, scenario(), num_own=1)
        await again.train(2)
        return again

    again = run_in_virtual_time(go_on)
    assert [point.version for point in again.points] == [2, 2, 4, 6, 8]
    assert_pinned(again.points[1:])


@pytest.mark.slow
def test_steps_that_are_taken_again_have_their_evals_again(tmp_path):
    async def main(world: World) -> None:
        training = asyncio.create_task(world.train())
        await until(lambda: world.own_engines[0].num_running > 0)
        training.cancel()
        await asyncio.wait([training])
        # New ranks, and everything as before the first step, with other weights for each number.
        world.folder.go_back(Restart(time_s=0.0, reason="", reached=2, step=0, checkpoint=""))
        await world.train()

    world = in_world(main, tmp_path, num_own=1, workload=SHORT)
    assert [point.version for point in world.points] == [2, 4, 6, 8]
    assert_pinned(world.points)


def test_evals_around_training_use_all_servers(tmp_path):
    async def main(world: World) -> None:
        await world.publisher.connect()
        await world.evals.whole_round(BEFORE, 0)
        await world.publisher.publish(1)
        await world.evals.whole_round(AFTER, 1)

    world = in_world(main, tmp_path, num_own=1)
    assert [point.tag for point in world.points] == [BEFORE, AFTER]
    assert_pinned(world.points)
    assert all(engine.num_tokens_written for engine in world.own_engines)
    assert any(engine.num_tokens_written for engine in world.run.engines)


def test_requests_of_evals_wait_for_those_of_rollouts(tmp_path):
    ended: list[str] = []

    async def main(world: World) -> None:
        async def ask(servers: Any, name: str) -> None:
            policy = SimulatedPolicy(servers, f"{name}/0")
            await policy.say(Sampling(max_tokens=1000), num_new_tokens=64, num_tokens=640)
            ended.append(name)

        asked = [asyncio.create_task(ask(world.run.pool, "first"))]
        await asyncio.sleep(1.0)
        asked.append(asyncio.create_task(ask(world.servers, "eval")))
        await asyncio.sleep(1.0)
        asked += [asyncio.create_task(ask(world.run.pool, f"rollout-{n}")) for n in range(3)]
        await asyncio.gather(*asked)

    busy = replace(scenario(engine=EngineSpeed(slots=1)), num_servers=1)
    in_world(main, tmp_path, scenario=busy)
    assert ended[-1] == "eval"


@pytest.mark.slow
def test_training_does_not_wait_for_a_server_of_evals_that_hangs(tmp_path):
    silent_s = 10.0**6
    quiet = in_world(World.train, tmp_path / "quiet", scenario=scenario(every=0), num_own=1)
    for when in ("before", "while it receives", "when it is to join"):

        async def main(world: World, when: str = when) -> None:
            own = world.servers.own
            assert own is not None
            client = own.clients[0]
            control = client.control

            async def hangs(*, within_s: float) -> bool:
                await asyncio.sleep(within_s)
                return False

            async def takes(path: str, body: Any = None, **options: Any) -> Any:
                at = {"while it receives": "/update_weights"}.get(when, "/init_weight_transfer")
                if not path.startswith(at):
                    return await control(path, body, **options)
                try:
                    async with asyncio.timeout(options["deadline_s"]):
                        await asyncio.sleep(silent_s)
                except TimeoutError:
                    raise ServerLostError("it did not answer") from None

            client.control = takes
            if when == "before":
                client.is_alive = hangs
            await world.train()

        world = in_world(main, tmp_path / when, num_own=1)
        assert len(world.run.history.rows) == 8
        assert [point.state for point in world.points] == [EvalPointState.SKIPPED] * 4
        assert "no server for evals answers: " in world.points[0].reason
        assert world.points[0].reason == world.points[-1].reason
        # Once for the server, and not once for each eval.
        assert world.step_ends_s[-1] < quiet.step_ends_s[-1] + 2 * OTHERS_WAIT_S


def test_weights_that_cannot_be_sent_to_evals_do_not_end_the_run(tmp_path):
    async def main(world: World) -> None:
        connect = world.run.ranks.connect

        async def refuses(place: Place, *, wait_s: Any = None) -> None:
            if wait_s is not None:
                raise TransferError("not all have joined")
            await connect(place, wait_s=wait_s)

        world.run.ranks.connect = refuses  # type: ignore[method-assign]
        await world.train()

    world = in_world(main, tmp_path, num_own=1)
    assert len(world.run.history.rows) == 8
    assert {point.state for point in world.points} == {EvalPointState.SKIPPED}
    assert "not all have joined" in world.points[0].reason


def test_each_server_that_evaluates_is_kept_busy(tmp_path):
    under_way = Counter[str]()

    async def main(world: World) -> None:
        assert world.servers.own is not None
        for pool in (world.servers.own, world.run.pool):
            for client in pool.clients:
                client.generate = counted(client, under_way)
        await world.publisher.connect()
        await world.evals.whole_round(BEFORE, 0)
        # Two for each of the four servers of the run, and then for each of the two for evals.
        assert under_way["most"] == 8
        under_way.clear()
        await world.publisher.publish(2)
        await world.evals.after_step(2)
        await world.evals.finish()
        assert under_way["most"] == 4

    in_world(main, tmp_path, num_own=2, concurrency=2)


def test_evals_on_shared_servers_leave_room_for_rollouts(tmp_path):
    under_way = Counter[str]()

    async def main(world: World) -> None:
        for client in world.run.pool.clients:
            client.generate = counted(client, under_way)
        await world.publisher.connect()
        await world.evals.after_step(2)
        await world.evals.finish()

    in_world(main, tmp_path, concurrency=2)
    assert under_way["most"] == 2


def counted(client: Any, under_way: Counter[str]) -> Any:
    """Return the client's `generate`, which notes the most requests that it has at a time."""
    generate = client.generate

    async def counting(*arguments: Any, **options: Any) -> Any:
        under_way["now"] += 1
        under_way["most"] = max(under_way["most"], under_way["now"])
        try:
            return await generate(*arguments, **options)
        finally:
            under_way["now"] -= 1

    return counting


def test_what_an_eval_gave_is_in_the_row_of_the_step_at_which_it_was_known(tmp_path):
    late = Workload(lengths=lognormal(2000, 0.2))
    world = in_world(World.train, tmp_path, num_own=1, workload=late)
    rows = {row["step"]: row for row in world.run.history.rows}
    done = next(point for point in world.points if point.state is DONE)
    # That of the last step ends after it, and has no row.
    (known,) = [step for step, row in rows.items() if "eval/held-out/reward" in row]
    row = rows[known]
    assert row["eval/held-out/version"] == done.version == 2
    assert row["eval/held-out/reward"] == done.reward
    assert row["eval/held-out/reward/low"] <= done.reward <= row["eval/held-out/reward/high"]
    assert row["eval/held-out/pass@1"] == done.pass_at[1]
    assert "eval/held-out/pass@1/low" in row
    assert row["eval/lag_steps"] == done.lag_steps >= 1
    told_apart = {key for key in row if key.startswith("eval/held-out/")}
    assert world.tracked[known].keys() - {"time_s"} == row.keys() - told_apart
    # It was known after the row of the step before was written.
    assert done.version + done.lag_steps == known - 1
    skipped = [point for point in world.points if point.state is EvalPointState.SKIPPED]
    told = sum(row.get("eval/missing", 0) for row in rows.values())
    assert told == sum(point.version < 8 for point in skipped)
    assert all(not any(key.startswith("eval/") for key in rows[step]) for step in (1, 2, 3))


@pytest.mark.slow
def test_debug_messages_tell_draws_servers_and_transfers(tmp_path, caplog):
    async def trained(world: World) -> None:
        await world.train()

    with caplog.at_level("DEBUG", logger="telescope_train"):
        in_world(trained, tmp_path, num_own=1)
    told = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    for part in ("is example", "weights 1 are live on", "life 1: updating"):
        assert [one for one in told if part in one], part
    caplog.clear()
    with caplog.at_level("INFO", logger="telescope_train"):
        in_world(trained, tmp_path / "quiet", num_own=1)
    assert not [record for record in caplog.records if record.levelname == "DEBUG"]
