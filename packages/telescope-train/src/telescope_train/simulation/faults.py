"""Runs in which things go wrong, drawn from a seed: what must hold in every one of them.

A schedule is a small run with settings and faults that follow from its kind and its number alone,
so the name that a failure prints plays the same run again. See `ledger` for what is checked.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from telescope_core.types import Group
from telescope_train.backends.protocol import RankDiedError
from telescope_train.cluster.supervision import supervised
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.control import call_servers
from telescope_train.inference.keeping import MOST_RESTARTS
from telescope_train.lives import live
from telescope_train.loop import LoopParts, train
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.environments import Workload, bimodal, lognormal
from telescope_train.simulation.fleet import SimulatedFleet
from telescope_train.simulation.ledger import Ledger
from telescope_train.simulation.run import Scenario, SimulatedRun
from telescope_train.simulation.servers import ServerTimes, SimulatedClient
from telescope_train.simulation.trainer import TrainerSpeed
from telescope_train.simulation.virtual_time import Deadlock, run_in_virtual_time

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run and what goes wrong in it."""

    kind: str
    number: int
    scenario: Scenario
    disturb: Callable[[SimulatedRun, random.Random], None] = lambda run, chance: None
    """Plans what happens to the servers while the run goes on."""
    kills_s: Sequence[float] = ()
    """When the driver is killed; it is started again from its newest checkpoint."""

    @property
    def name(self) -> str:
        """What plays it again."""
        return f"{self.kind}/{self.number}"


class _Saved(NamedTuple):
    """A checkpoint."""

    step: int
    state: SamplerState


@dataclass(slots=True, kw_only=True)
class _Plan:
    """What a kind of fault changes."""

    workload: Workload
    engine: EngineSpeed
    servers: ServerTimes
    trainer: TrainerSpeed
    scheduling: dict[str, object]
    rollout: dict[str, object] = field(default_factory=dict[str, object])
    fleet: Callable[[Sequence[SimulatedEngine]], SimulatedFleet] | None = None
    disturb: Callable[[SimulatedRun, random.Random], None] = lambda run, chance: None
    kills_s: Sequence[float] = ()


def schedule(kind: str, number: int) -> Schedule:
    """Return schedule `number` of a kind; the same every time."""
    chance = random.Random(f"{kind}/{number}")
    ahead = chance.choice([0, 1, 1, 2, 3])
    order = chance.choice(["drawn", "drawn", "finished"]) if ahead else "drawn"
    plan = _Plan(
        workload=_workload(chance),
        engine=EngineSpeed(slots=chance.choice([4, 64]), cache_tokens=1_000_000),
        servers=ServerTimes(),
        trainer=TrainerSpeed(),
        scheduling={
            "max_async_rollout": ahead,
            "stream_gradients": chance.choice(["auto", False]),
            "batch_order": order,
            "max_off_policy_steps": ahead + chance.randrange(3),
            "in_flight_update": chance.choice(["pause", "continue", "abort"]),
            "max_concurrent_prompts_per_server": chance.choice([1, 2, 8]),
            "enable_individual_sample_lanes": chance.random() < 0.7,
            "free_lane_after_generation": chance.random() < 0.7,
            "follow_kv_cache_use": chance.random() < 0.5,
            "enable_prompt_prefetch": chance.random() < 0.5,
        },
    )
    if chance.random() < 0.3:
        plan.scheduling["max_open_rollouts"] = chance.choice([1, 3, 30])
    KINDS[kind](plan, chance)
    config = TrainConfig.model_validate(
        {
            "run": {"name": kind, "number_of_steps": chance.randint(3, 7), "seed": number},
            "model": {"model": "none"},
            "environments": [{"name": "simulated"}],
            "rollout": {
                "group_size": chance.randint(2, 4),
                "prompts_batch_size_for_trainer": chance.randint(2, 5),
                "max_tokens": 8192,
                "rollout_timeout_s": _TIMEOUT_S,
                **plan.rollout,
            },
            "scheduling": plan.scheduling,
            # Room for as many turns of as many tokens as any kind has.
            "trainer": {"seq_len": 131_072},
        }
    )
    return Schedule(
        kind=kind,
        number=number,
        scenario=Scenario(
            config=config,
            workload=plan.workload,
            num_servers=chance.randint(1, 3),
            num_ranks=chance.randint(1, 3),
            engine=plan.engine,
            servers=plan.servers,
            trainer=plan.trainer,
            fleet=plan.fleet,
            # As a real run does: what one server does wrong holds up no other.
            call=call_servers,
        ),
        disturb=plan.disturb,
        kills_s=plan.kills_s,
    )


def play(planned: Schedule) -> list[str]:
    """Play a schedule, and return what was wrong; empty = nothing."""
    ledger = Ledger()
    try:
        run_in_virtual_time(lambda: _lives(planned, ledger))
    except Deadlock as error:
        return [str(error)]
    return list(ledger.problems(planned.scenario.config))


async def _lives(planned: Schedule, ledger: Ledger) -> None:
    """Run the driver; after each kill, run another one from the newest checkpoint."""
    chance = random.Random(f"{planned.name}/disturb")
    saved = _Saved(0, SamplerState(next_batch=0, draw_position=0, batches={}))
    loop = asyncio.get_running_loop()
    for kill_s in (*planned.kills_s, None):
        run = SimulatedRun(planned.scenario, ledger)
        planned.disturb(run, chance)
        newest = [saved]
        life = asyncio.create_task(run.watched(_life(run, newest, ledger)))
        timeout = None if kill_s is None else max(0.0, kill_s - loop.time())
        await asyncio.wait([life], timeout=timeout)
        if life.done():
            await life
            return
        life.cancel()
        await asyncio.wait([life])
        saved = newest[-1]
        ledger.forget_after(saved.step, saved.state)


async def _life(run: SimulatedRun, newest: list[_Saved], ledger: Ledger) -> None:
    """Take all steps after the newest checkpoint; if ranks die, from the newest of that time."""

    async def go_back(died: RankDiedError) -> _Saved:
        run.ranks.start_again()
        begun = newest[-1]
        ledger.forget_after(begun.step, begun.state)
        await run.publisher.restore(begun.step)
        return begun

    await live(
        newest[-1],
        lambda begun: supervised(_steps(run, begun, newest), [run.ranks.watch()], grace_s=0.0),
        go_back=go_back,
        died=lambda died: None,
    )


async def _steps(run: SimulatedRun, begun: _Saved, newest: list[_Saved]) -> None:
    """Go on from a checkpoint to the end, and save one after each step."""
    parts = await run.parts(begun.step)
    parts.sampler.restore(begun.state)
    run.follow(parts)

    async def save(step: int, row: dict[str, float]) -> None:
        newest.append(_Saved(step, await parts.sampler.settled(step)))

    try:
        await train(parts, after_step=save)
    finally:
        await parts.sampler.close()
    _require_all_free(run, parts)


def _require_all_free(run: SimulatedRun, parts: LoopParts) -> None:
    seats = parts.sampler.seats
    held = {"lanes": seats.lanes.num_held, "rollouts": seats.num_playing}
    held |= {engine.name: engine.num_running + engine.num_waiting for engine in run.engines}
    held |= {one.base_url: one.num_in_flight for one in run.pool.clients}
    assert not any(held.values()), f"a run that has ended still holds {held}"


def _workload(chance: random.Random) -> Workload:
    lengths = chance.choice([lognormal(500, 0.9), bimodal(100, 3000, 0.2), lognormal(50, 0.3)])
    turns = chance.choice([(1, 1), (1, 1), (1, 6)])
    return Workload(lengths=lengths, num_turns=turns, tool_s=chance.choice([0.0, 1.0, 20.0]))


def _raises(plan: _Plan, chance: random.Random) -> None:
    # Of attempts, whatever the number of their calls: a batch of which nothing is left ends a run.
    share, num_calls = chance.choice([0.05, 0.3]), plan.workload.num_turns[1]
    plan.workload = replace(plan.workload, failure_rate=share / num_calls)


def _process_dies(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, loss_rate=chance.choice([0.05, 0.3]))


def _environment_hangs(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, hang_rate=chance.choice([0.02, 0.2]))


def _reward_hangs(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, hung_reward_rate=chance.choice([0.02, 0.2]))


def _slow_tools(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, num_turns=(2, 8), tool_s=chance.uniform(20, 60))


def _slow_rewards(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, reward_s=chance.uniform(10, 200))


def _stragglers(plan: _Plan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, lengths=bimodal(50, 7000, 0.1))


def _rejections(plan: _Plan, chance: random.Random) -> None:
    plan.rollout["should_accept_fn"] = "telescope_train.simulation.faults:accepts_half"


def accepts_half(group: Group) -> bool | str:
    """Accept about half of all groups, by their ids."""
    return random.Random(group.id).random() < 0.5 or "by chance"


def _request_errors(plan: _Plan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, error_rate=chance.choice([0.02, 0.2]))


def _slow_network(plan: _Plan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, round_trip_s=chance.uniform(0.5, 5))


def _slow_transfer(plan: _Plan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, transfer_s=chance.uniform(10, 90))
    plan.trainer = replace(plan.trainer, send_s=chance.uniform(10, 90))


def _slow_ranks(plan: _Plan, chance: random.Random) -> None:
    plan.trainer = replace(plan.trainer, jitter=chance.choice([1.0, 20.0]), optimizer_s=5.0)


def _small_cache(plan: _Plan, chance: random.Random) -> None:
    plan.engine = replace(plan.engine, cache_tokens=chance.randint(90_000, 120_000))
    plan.workload = replace(plan.workload, lengths=lognormal(3000, 0.5), num_turns=(1, 5))


def _one_slow_server(plan: _Plan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        engine = chance.choice(run.engines)
        _later(chance, lambda: engine.change_speed(chance.uniform(3, 20)))

    plan.disturb = disturb


def _server_stands_still(plan: _Plan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 4)):
            engine = chance.choice(run.engines)
            _later(chance, lambda engine=engine: engine.stand_still(chance.uniform(5, 60)))

    plan.disturb = disturb


def _servers_die(plan: _Plan, chance: random.Random) -> None:
    """At any moment, so that servers idle then, or sample, or get weights."""
    num_deaths = chance.randint(1, MOST_RESTARTS)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(num_deaths):
            engine = chance.choice(run.engines)
            _later(chance, lambda engine=engine: engine.die("killed, as planned"))

    plan.fleet = partial(SimulatedFleet, start_s=chance.uniform(1, 60))
    plan.disturb = disturb


def _servers_hang(plan: _Plan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 3)):
            engine = chance.choice(run.engines)
            _later(chance, engine.hang)

    plan.fleet = partial(SimulatedFleet, progress_s=chance.uniform(10, 60))
    plan.disturb = disturb


def _servers_die_in_updates(plan: _Plan, chance: random.Random) -> None:
    """While they are paused and receive: then the group is made anew and all is sent again."""
    num_deaths = chance.randint(1, MOST_RESTARTS)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        send = run.ranks.send_weights

        async def send_weights() -> str:
            nonlocal num_deaths
            if num_deaths and chance.random() < 0.5:
                num_deaths -= 1
                engine = chance.choice(run.engines)
                delay_s = chance.uniform(0, plan.trainer.send_s)
                _after(delay_s, lambda: engine.die("killed in an update, as planned"))
            return await send()

        run.ranks.send_weights = send_weights

    plan.fleet = partial(SimulatedFleet, start_s=chance.uniform(1, 60))
    plan.disturb = disturb


def _restarts_fail(plan: _Plan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        engine = chance.choice(run.engines)
        _later(chance, lambda: engine.die("killed, as planned"))

    plan.fleet = partial(SimulatedFleet, start_s=5.0, failed_starts=chance.randint(1, 4))
    plan.disturb = disturb


def _weights_arrive_changed(plan: _Plan, chance: random.Random) -> None:
    """A server that holds something else than was sent must not sample."""

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for client in run.pool.clients:
            assert isinstance(client, SimulatedClient)
            client.corrupts = lambda: chance.random() < 0.1

    plan.fleet = partial(SimulatedFleet, start_s=5.0)
    plan.disturb = disturb


def _one_lane(plan: _Plan, chance: random.Random) -> None:
    plan.scheduling |= {"max_concurrent_prompts_per_server": 1, "max_open_rollouts": 1}
    plan.scheduling["enable_individual_sample_lanes"] = chance.random() < 0.5
    plan.rollout["group_size"] = 2


def _late_in_finished_order(plan: _Plan, chance: random.Random) -> None:
    plan.scheduling |= {"batch_order": "finished", "max_async_rollout": 1}
    plan.scheduling["max_off_policy_steps"] = 1
    plan.workload = replace(plan.workload, lengths=bimodal(20, 6000, 0.15))


def _ranks_die(plan: _Plan, chance: random.Random) -> None:
    """At any moment: in a step, in an update, or while they wait."""
    num_deaths = chance.randint(1, 4)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(num_deaths):
            _later(chance, run.ranks.die)

    plan.disturb = disturb


def _ranks_die_in_updates(plan: _Plan, chance: random.Random) -> None:
    num_deaths = chance.randint(1, 3)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        send = run.ranks.send_weights

        async def send_weights() -> str:
            nonlocal num_deaths
            if num_deaths and chance.random() < 0.5:
                num_deaths -= 1
                _after(chance.uniform(0, plan.trainer.send_s), run.ranks.die)
            return await send()

        run.ranks.send_weights = send_weights

    plan.disturb = disturb


def _driver_is_killed(plan: _Plan, chance: random.Random) -> None:
    plan.kills_s = sorted(chance.uniform(0, 120) for _ in range(chance.randint(1, 4)))


def _driver_is_killed_with_rejections(plan: _Plan, chance: random.Random) -> None:
    _driver_is_killed(plan, chance)
    _rejections(plan, chance)


def _everything(plan: _Plan, chance: random.Random) -> None:
    for fault in chance.sample(sorted(_SINGLE), 4):
        _SINGLE[fault](plan, chance)
    if plan.fleet is None:
        # Ranks that die in an update may take servers with them, which a run starts again.
        plan.fleet = SimulatedFleet


def _later(chance: random.Random, action: Callable[[], None]) -> None:
    _after(chance.uniform(0, 100), action)


def _after(delay_s: float, action: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(delay_s, action)


_SINGLE: Mapping[str, Callable[[_Plan, random.Random], None]] = {
    "environment-raises": _raises,
    "environment-dies": _process_dies,
    "environment-hangs": _environment_hangs,
    "reward-hangs": _reward_hangs,
    "slow-tools": _slow_tools,
    "slow-rewards": _slow_rewards,
    "stragglers": _stragglers,
    "rejections": _rejections,
    "request-errors": _request_errors,
    "slow-network": _slow_network,
    "slow-transfer": _slow_transfer,
    "slow-ranks": _slow_ranks,
    "small-cache": _small_cache,
    "slow-server": _one_slow_server,
    "server-stands-still": _server_stands_still,
    "servers-die": _servers_die,
    "servers-hang": _servers_hang,
    "servers-die-in-updates": _servers_die_in_updates,
    "restarts-fail": _restarts_fail,
    "weights-arrive-changed": _weights_arrive_changed,
    "one-lane": _one_lane,
    "finished-order": _late_in_finished_order,
    "ranks-die": _ranks_die,
    "ranks-die-in-updates": _ranks_die_in_updates,
    "driver-killed": _driver_is_killed,
    "driver-killed-with-rejections": _driver_is_killed_with_rejections,
}
KINDS: Mapping[str, Callable[[_Plan, random.Random], None]] = {
    **_SINGLE,
    "several-at-once": _everything,
}
"""Name -> what a kind of fault changes."""
