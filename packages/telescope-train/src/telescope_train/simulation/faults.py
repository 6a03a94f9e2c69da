"""Runs in which things go wrong, drawn from a seed: what must hold in every one of them.

A schedule is a small run with settings and faults that follow from its kind and its number alone,
so the name that a failure prints plays the same run again. See `ledger` for what is checked.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from telescope_train.backends.protocol import RankDiedError
from telescope_train.cluster.supervision import supervised
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.control import call_servers
from telescope_train.lives import live
from telescope_train.loop import LoopParts, train
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.simulation.engine import EngineSpeed
from telescope_train.simulation.fault_kinds import KINDS, Plan, some_workload
from telescope_train.simulation.ledger import Ledger
from telescope_train.simulation.run import Scenario, SimulatedRun
from telescope_train.simulation.servers import ServerTimes
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
    checkpoint_every: int = 1
    """Steps from one checkpoint to the next."""
    checkpoint_s: float = 0.0
    """Seconds to write one, while steps go on."""

    @property
    def name(self) -> str:
        """What plays it again."""
        return f"{self.kind}/{self.number}"


class _Saved(NamedTuple):
    """A checkpoint."""

    step: int
    state: SamplerState


def schedule(kind: str, number: int) -> Schedule:
    """Return schedule `number` of a kind; the same every time."""
    chance = random.Random(f"{kind}/{number}")
    ahead = chance.choice([0, 1, 1, 2, 3])
    order = chance.choice(["drawn", "drawn", "finished"]) if ahead else "drawn"
    plan = Plan(
        workload=some_workload(chance),
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
        checkpoint_every=plan.checkpoint_every,
        checkpoint_s=plan.checkpoint_s,
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
        life = asyncio.create_task(run.watched(_life(run, newest, ledger, planned)))
        timeout = None if kill_s is None else max(0.0, kill_s - loop.time())
        await asyncio.wait([life], timeout=timeout)
        if life.done():
            await life
            return
        life.cancel()
        await asyncio.wait([life])
        saved = newest[-1]
        ledger.forget_after(saved.step, saved.state)


async def _life(run: SimulatedRun, newest: list[_Saved], ledger: Ledger, plan: Schedule) -> None:
    """Take all steps after the newest checkpoint; if ranks die, from the newest of that time."""

    async def go_back(died: RankDiedError) -> _Saved:
        run.ranks.start_again()
        begun = newest[-1]
        ledger.forget_after(begun.step, begun.state)
        await run.publisher.restore(begun.step)
        return begun

    await live(
        newest[-1],
        lambda begun: supervised(
            _steps(run, begun, newest, plan), [run.ranks.watch()], grace_s=0.0
        ),
        go_back=go_back,
        died=lambda died: None,
    )


async def _steps(run: SimulatedRun, begun: _Saved, newest: list[_Saved], plan: Schedule) -> None:
    """Go on from a checkpoint to the end, and save one after each step that is due."""
    writing: list[asyncio.TimerHandle] = []
    parts = await run.parts(begun.step)
    parts.sampler.restore(begun.state)
    run.follow(parts)

    async def save(step: int, row: dict[str, float]) -> None:
        if step % plan.checkpoint_every:
            return
        saved = _Saved(step, await parts.sampler.settled(step))
        if not plan.checkpoint_s:
            newest.append(saved)
            return
        loop = asyncio.get_running_loop()
        writing.append(loop.call_later(plan.checkpoint_s, newest.append, saved))

    try:
        await train(parts, after_step=save)
    finally:
        for one in writing:
            one.cancel()
        await parts.sampler.close()
    _require_all_free(run, parts)


def _require_all_free(run: SimulatedRun, parts: LoopParts) -> None:
    seats = parts.sampler.seats
    held = {"lanes": seats.lanes.num_held, "rollouts": seats.num_playing}
    held |= {engine.name: engine.num_running + engine.num_waiting for engine in run.engines}
    held |= {one.base_url: one.num_in_flight for one in run.pool.clients}
    assert not any(held.values()), f"a run that has ended still holds {held}"
