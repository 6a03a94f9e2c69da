"""Runs in which things go wrong, drawn from a seed: what must hold in every one of them.

A schedule is a small run with settings and faults that follow from its kind and its number alone,
so the name that a failure prints plays the same run again. See `ledger` for what is checked.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.simulation.disk import SavingRanks
from tests.simulation.kinds import KINDS
from tests.simulation.ledger import Ledger
from tests.simulation.plan import FaultPlan, nothing, some_workload
from tests.simulation.restarts import Ended, RestartedRun

from telescope_train.config.schema import TrainConfig
from telescope_train.inference.servers import call_servers
from telescope_train.simulation.engine import EngineSpeed
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
    disturb: Callable[[SimulatedRun, random.Random], None] = nothing
    """Plans what happens to the servers while the run goes on."""
    kills_s: Sequence[float] = ()
    """When the driver is killed; it is started again from its newest checkpoint."""
    is_exact: bool = False
    """Whether its weights end as those of the same run without disturbances."""

    @property
    def name(self) -> str:
        """What plays it again."""
        return f"{self.kind}/{self.number}"


def schedule(kind: str, number: int) -> Schedule:
    """Return schedule `number` of a kind; the same every time."""
    chance = random.Random(f"{kind}/{number}")
    ahead = chance.choice([0, 1, 1, 2, 3])
    order = chance.choice(["drawn", "drawn", "finished"]) if ahead else "drawn"
    plan = FaultPlan(
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
            "checkpoint": plan.checkpoint,
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
            ranks=partial(SavingRanks, times=plan.disk),
            fleet=plan.fleet,
            # As a real run does: what one server does wrong holds up no other.
            call=call_servers,
        ),
        disturb=plan.disturb,
        kills_s=plan.kills_s,
        # In finished order it depends on times which groups a step is trained on.
        is_exact=plan.is_exact and order == "drawn",
    )


def play(planned: Schedule) -> list[str]:
    """Play a schedule, and return what was wrong; empty = nothing."""
    ledger = Ledger()
    try:
        ended = played(planned, ledger)
        problems = [
            *ledger.problems(planned.scenario.config),
            *ledger.wrong_weights(ended.weights),
            *ended.problems,
        ]
        if planned.is_exact:
            alone = played(replace(planned, disturb=nothing, kills_s=()), Ledger())
            if ended.weights != alone.weights:
                problems.append(f"undisturbed weights {alone.weights} became {ended.weights}")
    except Deadlock as error:
        return [str(error)]
    return problems


def played(planned: Schedule, ledger: Ledger) -> Ended:
    """Play a schedule to its end, whatever was wrong; raises Deadlock if it has none."""
    with tempfile.TemporaryDirectory() as folder:
        run = RestartedRun(planned.scenario, planned.disturb, planned.kills_s, ledger, Path(folder))
        return run_in_virtual_time(lambda: run.all(random.Random(f"{planned.name}/disturb")))
