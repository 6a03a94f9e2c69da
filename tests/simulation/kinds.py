"""Kinds of faults: what each changes in a run, drawn by chance."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tests.simulation.checkpoint_kinds import CHECKPOINT_FAULTS
from tests.simulation.disk import DiskTimes
from tests.simulation.fleet import SimulatedFleet
from tests.simulation.plan import FaultPlan, after, later

from telescope_core.base.types import Group
from telescope_train.inference.supervisor import MOST_RESTARTS
from telescope_train.simulation.engine import SimulatedEngine
from telescope_train.simulation.environments import bimodal, lognormal
from telescope_train.simulation.run import SimulatedRun
from telescope_train.simulation.servers import SimulatedClient


def _raises(plan: FaultPlan, chance: random.Random) -> None:
    # Of attempts, whatever the number of their calls: a batch of which nothing is left ends a run.
    share, num_calls = chance.choice([0.05, 0.3]), plan.workload.num_turns[1]
    plan.workload = replace(plan.workload, failure_rate=share / num_calls)


def _process_dies(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, loss_rate=chance.choice([0.05, 0.3]))


def _environment_hangs(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, hang_rate=chance.choice([0.02, 0.2]))


def _reward_hangs(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, hung_reward_rate=chance.choice([0.02, 0.2]))


def _slow_tools(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, num_turns=(2, 8), tool_s=chance.uniform(20, 60))


def _slow_rewards(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, reward_s=chance.uniform(10, 200))


def _stragglers(plan: FaultPlan, chance: random.Random) -> None:
    plan.workload = replace(plan.workload, lengths=bimodal(50, 7000, 0.1))


def _rejections(plan: FaultPlan, chance: random.Random) -> None:
    plan.rollout["should_accept_fn"] = "tests.simulation.kinds:accepts_half"


def accepts_half(group: Group) -> bool | str:
    """Accept about half of all groups, by their ids."""
    return random.Random(group.id).random() < 0.5 or "by chance"


def _request_errors(plan: FaultPlan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, error_rate=chance.choice([0.02, 0.2]))


def _slow_network(plan: FaultPlan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, round_trip_s=chance.uniform(0.5, 5))


def _slow_transfer(plan: FaultPlan, chance: random.Random) -> None:
    plan.servers = replace(plan.servers, transfer_s=chance.uniform(10, 90))
    plan.trainer = replace(plan.trainer, send_s=chance.uniform(10, 90))


def _slow_ranks(plan: FaultPlan, chance: random.Random) -> None:
    plan.trainer = replace(plan.trainer, jitter=chance.choice([1.0, 20.0]), optimizer_s=5.0)


def _small_cache(plan: FaultPlan, chance: random.Random) -> None:
    plan.engine = replace(plan.engine, cache_tokens=chance.randint(90_000, 120_000))
    plan.workload = replace(plan.workload, lengths=lognormal(3000, 0.5), num_turns=(1, 5))


def _one_slow_server(plan: FaultPlan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        engine = chance.choice(run.engines)
        later(chance, lambda: _change_speed(engine, chance.uniform(3, 20)))

    plan.disturb = disturb


def _server_stands_still(plan: FaultPlan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 4)):
            engine = chance.choice(run.engines)
            later(chance, lambda engine=engine: _stand_still(engine, chance.uniform(5, 60)))

    plan.disturb = disturb


def _change_speed(engine: SimulatedEngine, factor: float) -> None:
    """Take `factor` times as long for each step from now on."""
    engine._advance()
    engine.speed = replace(engine.speed, step_s=engine.speed.step_s * factor)
    engine._wake()


def _stand_still(engine: SimulatedEngine, seconds: float) -> None:
    """Do nothing for a while, as behind a broken network, and continue."""
    engine._advance()
    now_s = asyncio.get_running_loop().time()
    engine._stalled_until_s = max(now_s, engine._stalled_until_s) + seconds
    engine._wake()


def _servers_die(plan: FaultPlan, chance: random.Random) -> None:
    """At any moment, so that servers idle then, or sample, or get weights."""
    num_deaths = chance.randint(1, MOST_RESTARTS)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(num_deaths):
            engine = chance.choice(run.engines)
            later(chance, lambda engine=engine: engine.die("killed, as planned"))

    plan.fleet = partial(SimulatedFleet, start_s=chance.uniform(1, 60))
    plan.disturb = disturb


def _servers_hang(plan: FaultPlan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 3)):
            engine = chance.choice(run.engines)
            later(chance, engine.hang)

    plan.fleet = partial(SimulatedFleet, progress_s=chance.uniform(10, 60))
    plan.disturb = disturb


def _servers_die_in_updates(plan: FaultPlan, chance: random.Random) -> None:
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
                after(delay_s, lambda: engine.die("killed in an update, as planned"))
            return await send()

        run.ranks.send_weights = send_weights

    plan.fleet = partial(SimulatedFleet, start_s=chance.uniform(1, 60))
    plan.disturb = disturb


def _restarts_fail(plan: FaultPlan, chance: random.Random) -> None:
    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        engine = chance.choice(run.engines)
        later(chance, lambda: engine.die("killed, as planned"))

    plan.fleet = partial(SimulatedFleet, start_s=5.0, failed_starts=chance.randint(1, 4))
    plan.disturb = disturb


def _weights_arrive_changed(plan: FaultPlan, chance: random.Random) -> None:
    """A server that holds something else than was sent must not sample."""

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for client in run.pool.clients:
            assert isinstance(client, SimulatedClient)
            client.corrupts = lambda: chance.random() < 0.1

    plan.fleet = partial(SimulatedFleet, start_s=5.0)
    plan.disturb = disturb


def _answers_get_lost(plan: FaultPlan, chance: random.Random) -> None:
    """A server does what a control call asks for, and nobody hears of it."""
    share = chance.choice([0.02, 0.1])

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for client in run.pool.clients:
            assert isinstance(client, SimulatedClient)
            client.loses_answer = lambda path: chance.random() < share

    plan.fleet = partial(SimulatedFleet, start_s=5.0)
    plan.disturb = disturb


def _one_slot(plan: FaultPlan, chance: random.Random) -> None:
    plan.scheduling |= {"max_concurrent_prompts_per_server": 1, "max_open_rollouts": 1}
    plan.scheduling["enable_individual_sample_lanes"] = chance.random() < 0.5
    plan.rollout["group_size"] = 2


def _late_in_finished_order(plan: FaultPlan, chance: random.Random) -> None:
    plan.scheduling |= {"batch_order": "finished", "max_async_rollout": 1}
    plan.scheduling["max_off_policy_steps"] = 1
    plan.workload = replace(plan.workload, lengths=bimodal(20, 6000, 0.15))


def _ranks_die(plan: FaultPlan, chance: random.Random) -> None:
    """At any moment: in a step, in an update, or while they wait."""
    num_deaths = chance.randint(1, 4)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        for _ in range(num_deaths):
            later(chance, run.ranks.die)

    plan.disturb = disturb


def _ranks_die_in_updates(plan: FaultPlan, chance: random.Random) -> None:
    num_deaths = chance.randint(1, 3)

    def disturb(run: SimulatedRun, chance: random.Random) -> None:
        send = run.ranks.send_weights

        async def send_weights() -> str:
            nonlocal num_deaths
            if num_deaths and chance.random() < 0.5:
                num_deaths -= 1
                after(chance.uniform(0, plan.trainer.send_s), run.ranks.die)
            return await send()

        run.ranks.send_weights = send_weights

    plan.disturb = disturb


def _driver_is_killed(plan: FaultPlan, chance: random.Random) -> None:
    plan.kills_s = sorted(chance.uniform(0, 120) for _ in range(chance.randint(1, 4)))


def _driver_is_killed_with_rejections(plan: FaultPlan, chance: random.Random) -> None:
    _driver_is_killed(plan, chance)
    _rejections(plan, chance)


def _checkpoints_are_rare_and_slow(plan: FaultPlan, chance: random.Random) -> None:
    """What was done since the newest whole checkpoint is done again, several steps of it."""
    plan.checkpoint["checkpoint_every"] = chance.randint(1, 3)
    plan.disk = DiskTimes(write_s=chance.uniform(1, 60))
    chance.choice([_driver_is_killed, _ranks_die])(plan, chance)


def _everything(plan: FaultPlan, chance: random.Random) -> None:
    for fault in chance.sample(sorted(_SINGLE), 4):
        _SINGLE[fault](plan, chance)
    if plan.fleet is None:
        # Ranks that die in an update may take servers with them, which a run starts again.
        plan.fleet = SimulatedFleet


_SINGLE: Mapping[str, Callable[[FaultPlan, random.Random], None]] = {
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
    "one-slot": _one_slot,
    "finished-order": _late_in_finished_order,
    "ranks-die": _ranks_die,
    "ranks-die-in-updates": _ranks_die_in_updates,
    "driver-killed": _driver_is_killed,
    "driver-killed-with-rejections": _driver_is_killed_with_rejections,
}
KINDS: Mapping[str, Callable[[FaultPlan, random.Random], None]] = {
    **_SINGLE,
    "several-at-once": _everything,
    # Not part of several at once: its schedules stay those that they were.
    "answers-get-lost": _answers_get_lost,
    "checkpoints-rare-and-slow": _checkpoints_are_rare_and_slow,
    **CHECKPOINT_FAULTS,
}
"""Name -> what a kind of fault changes."""
