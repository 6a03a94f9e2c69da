"""One simulated run: the real loop, sampler, pool and publisher over modelled machines."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from telescope_core.base.collector import rare_collections
from telescope_core.base.types import JsonValue, Rollout, WeightVersion
from telescope_core.records import RolloutRow
from telescope_core.records.events import AttemptEvent
from telescope_core.records.token_facts import TurnFacts
from telescope_train.batches.packing import Packing
from telescope_train.cluster.supervision import supervised
from telescope_train.config.schema import TrainConfig
from telescope_train.inference.pool import ServerPool
from telescope_train.inference.servers import CallServers
from telescope_train.inference.supervisor import Fleet, Supervisor
from telescope_train.loop import LoopParts, train
from telescope_train.models.facts import UNKNOWN_FACTS
from telescope_train.rollouts.attempts import Attempts
from telescope_train.rollouts.mix import make_sampler, refuse_rewards, training_environments
from telescope_train.rollouts.slots import Concurrency
from telescope_train.simulation.engine import EngineSpeed, SimulatedEngine
from telescope_train.simulation.environments import SimulatedEnvironment, Workload
from telescope_train.simulation.servers import (
    ServerTimes,
    SimulatedClient,
    SimulatedPolicies,
    call_in_step,
    num_ids,
    read_in_turn,
)
from telescope_train.simulation.trainer import SimulatedRanks, TrainerSpeed
from telescope_train.simulation.virtual_time import in_background, run_in_virtual_time
from telescope_train.step.credit import credit_rules
from telescope_train.step.stream_rules import streams_gradients
from telescope_train.step.throughput import Machine
from telescope_train.weights.publish import WeightPublisher

_FIRST_INTERVAL_S = 1.0
_MOST_READINGS = 240
"""Most readings; an even number."""
_VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The load in one part of a simulated run."""

    from_s: float
    to_s: float
    servers_busy: float
    """Share of the servers' time in which they had work, 0 to 1."""
    ranks_busy: float
    """Share of the time in which the ranks computed, 0 to 1."""
    rollouts_waiting: float
    """Rollouts and calls that waited for a slot, or to begin."""
    requests_waiting: float
    """Requests in the queues of the servers."""
    groups_ready: float
    """Groups that were ready and not trained on yet."""


class _Reading(NamedTuple):
    time_s: float
    servers_s: float
    """Seconds in which servers had work so far, summed over all."""
    ranks_s: float
    queues: Mapping[str, float]
    """Lengths of the queues by their names in `Usage`, means since the previous reading."""


class UsageMeter:
    """Reads the load of a run repeatedly, at equal intervals of virtual time.

    When there are many readings, neighbors are made one and the interval doubles, so that a long
    run has as many as a short one.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        ranks: SimulatedRanks,
        sampler_queues: Callable[[], dict[str, int]],
    ) -> None:
        self._engines = engines
        self._ranks = ranks
        self._sampler_queues = sampler_queues
        self._interval_s = _FIRST_INTERVAL_S
        self._readings = [_Reading(0.0, 0.0, 0.0, {})]

    async def run(self) -> None:
        """Read until canceled."""
        while True:
            await asyncio.sleep(self._interval_s)
            self.read()

    def read(self) -> None:
        """Record the load up to now, and the queues."""
        queues = self._sampler_queues()
        self._readings.append(
            _Reading(
                time_s=asyncio.get_running_loop().time(),
                servers_s=sum(engine.busy_until_now_s for engine in self._engines),
                ranks_s=self._ranks.busy_until_now_s,
                queues={
                    "rollouts_waiting": queues["rollouts_waiting"],
                    "requests_waiting": sum(engine.num_waiting for engine in self._engines),
                    "groups_ready": queues["groups_ready"],
                },
            )
        )
        if len(self._readings) > _MOST_READINGS:
            self._merge()

    def usage(self) -> tuple[Usage, ...]:
        """Return the readings, in order."""
        return tuple(
            Usage(
                from_s=before.time_s,
                to_s=after.time_s,
                servers_busy=(after.servers_s - before.servers_s)
                / ((after.time_s - before.time_s) * len(self._engines)),
                ranks_busy=(after.ranks_s - before.ranks_s) / (after.time_s - before.time_s),
                **after.queues,
            )
            for before, after in pairwise(self._readings)
            if after.time_s > before.time_s
        )

    def _merge(self) -> None:
        """Merge pairs of readings, and read half as often from now on."""
        first, *rest = self._readings
        self._readings = [
            first,
            *(
                later._replace(
                    queues={
                        name: (one.queues[name] + now) / 2 for name, now in later.queues.items()
                    }
                )
                for one, later in zip(rest[::2], rest[1::2], strict=True)
            ),
        ]
        self._interval_s *= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Input of a simulation: the settings of a run, its machines, and how its rollouts behave."""

    config: TrainConfig
    workload: Workload
    num_servers: int = 4
    num_ranks: int = 4
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    servers: ServerTimes = field(default_factory=ServerTimes)
    trainer: TrainerSpeed = field(default_factory=TrainerSpeed)
    ranks: Callable[[int, TrainerSpeed], SimulatedRanks] = SimulatedRanks
    fleet: Callable[[Sequence[SimulatedEngine]], Fleet] | None = None
    """Creates the fleet that restarts lost servers; None = none is lost."""
    call: CallServers = call_in_step
    """Calls many servers; `call_servers` if their times differ."""
    on_step: Callable[[int], None] = lambda step: None
    """Called after each step."""
    adapt: Callable[[LoopParts], LoopParts] = lambda parts: parts
    """Changes the parts of the run, for instance to test another schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Results of a simulated run. Times are virtual unless stated otherwise."""

    rows: Sequence[dict[str, float]]
    """Metrics of each step, as a run writes them."""
    ended_s: Sequence[float]
    """Time at which each step ended."""
    duration_s: float
    server_busy: float
    """Share of the time in which servers had work, over all servers."""
    trainer_busy: float
    """Share of the time in which the ranks computed."""
    num_tokens: int
    """Number of tokens in answers that servers finished."""
    num_preemptions: int
    usage: tuple[Usage, ...]
    """Load of all parts, and lengths of queues, over time."""
    mean_drawn: float
    """Mean tokens of the drawn rollouts of all trained batches."""
    mean_trained: float
    """Mean tokens of the rollouts in these batches."""
    history: str
    """Digest of all rollouts and their times: equal for equal runs."""
    real_s: float
    """Real seconds of the simulation."""

    @property
    def step_s(self) -> float:
        """Mean duration of a step."""
        return self.duration_s / len(self.rows)

    @property
    def length_bias(self) -> float:
        """Mean trained over mean drawn length; 1 = long answers are trained as often as others."""
        return self.mean_trained / self.mean_drawn


class History:
    """Replaces the run folder, and keeps the data for `Simulated`."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()

    def log_metrics(self, row: Mapping[str, JsonValue]) -> None:
        """Keep the metrics of one step."""
        # The only number that is not virtual.
        self.rows.append({name: value for name, value in row.items() if name != "time_s"})
        self._digest.update(repr(sorted(self.rows[-1].items())).encode())

    def write_rollouts(self, step: int, rows: Iterable[RolloutRow]) -> None:
        """Discard the rows: each takes longer to write than its rollout to simulate."""

    def write_attempts(self, step: int, rows: Iterable[RolloutRow]) -> None:
        """Discard these too: they are counted in the metrics."""

    def write_token_facts(self, step: int, rows: Iterable[TurnFacts]) -> None:
        """Discard them: tokens are not simulated."""

    def add(self, event: AttemptEvent) -> None:
        """Process an event of an attempt."""
        text = f"{event.group_id}/{event.index} {event.attempt} {event.stage} {event.server}"
        self._digest.update(f"{text} {event.time_s:.9f}\n".encode())

    def pack(self, step: int) -> None:
        """Do nothing: events are not kept."""

    def played(self, rollout: Rollout) -> None:
        """Record the end of `rollout`."""
        now_s = asyncio.get_running_loop().time()
        text = f"{rollout.group_id}/{rollout.index} {rollout.status} {now_s:.9f}\n"
        self._digest.update(text.encode())

    @property
    def digest(self) -> str:
        """Digest of everything so far."""
        return self._digest.hexdigest()


def simulate(scenario: Scenario) -> Simulated:
    """Return the results of `scenario`; always the same, except `real_s`."""
    began_s = time.perf_counter()
    with rare_collections():
        result = run_in_virtual_time(lambda: _simulated(scenario))
    return replace(result, real_s=time.perf_counter() - began_s)


async def _simulated(scenario: Scenario) -> Simulated:
    return await SimulatedRun(scenario, History()).simulated()


class SimulatedRun:
    """All parts of one run, inside the loop."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        self._scenario = scenario
        self.history = history
        self.ended_s: list[float] = []
        self.environments = {
            entry.name: SimulatedEnvironment(
                scenario.workload,
                name=entry.name,
                seed=scenario.config.run.seed,
                on_end=self.history.played,
            )
            for entry in scenario.config.environments
        }
        self.engines = [
            SimulatedEngine(scenario.engine, name=f"server-{index}")
            for index in range(scenario.num_servers)
        ]
        self.ranks = scenario.ranks(scenario.num_ranks, scenario.trainer)
        self.pool = ServerPool(
            [
                SimulatedClient(one, scenario.servers, lambda: self.ranks.digest)
                for one in self.engines
            ],
            is_kept=scenario.fleet is not None,
        )
        self.publisher = WeightPublisher(
            self.pool,
            self.ranks,
            in_flight=scenario.config.scheduling.in_flight_update,
            call=scenario.call,
        )

    async def simulated(self) -> Simulated:
        """Take every step, and return the results."""
        parts = self._scenario.adapt(await self.parts())
        self.follow(parts)
        meter = UsageMeter(self.engines, self.ranks, parts.sampler.queues)
        in_background(meter.run())

        async def after_step(step: int, row: dict[str, float]) -> None:
            self.ended_s.append(asyncio.get_running_loop().time())
            self._scenario.on_step(step)

        try:
            await self.watched(train(parts, after_step=after_step))
            meter.read()
        finally:
            await parts.sampler.close()
        duration_s = asyncio.get_running_loop().time()
        rows = self.history.rows
        drawn = [
            num_tokens
            for environment in self.environments.values()
            for group_id, num_tokens in environment.drawn
            if int(group_id.partition(".")[0]) < len(rows)
        ]
        return Simulated(
            rows=rows,
            ended_s=tuple(self.ended_s),
            duration_s=duration_s,
            usage=meter.usage(),
            server_busy=sum(e.busy_s for e in self.engines) / (duration_s * len(self.engines)),
            trainer_busy=self.ranks.busy_s / duration_s,
            num_tokens=sum(engine.num_tokens_written for engine in self.engines),
            num_preemptions=sum(engine.num_preemptions for engine in self.engines),
            mean_drawn=float(np.mean(drawn)),
            mean_trained=float(np.mean([row["completion_len/mean"] for row in rows])),
            history=self.history.digest,
            real_s=0.0,
        )

    async def watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`, while lost servers are restarted."""
        if self._scenario.fleet is None:
            return await work
        fleet = self._scenario.fleet(self.engines)
        supervisor = Supervisor(self.pool, fleet, self.publisher.bring_in)
        await supervised(work, [supervisor.run()], grace_s=0.0)

    def follow(self, parts: LoopParts) -> None:
        """Let the number of slots follow the servers until the simulation ends, if it may."""
        config = self._scenario.config
        slots = parts.sampler.attempts.slots
        following = Concurrency.from_config(config, slots, self.pool, read_all=read_in_turn)
        if config.scheduling.follow_kv_cache_use or self._scenario.fleet is not None:
            in_background(following.run())

    async def parts(self, first_version: WeightVersion = 0) -> LoopParts:
        """Return the parts of the loop, with `first_version` live on all servers."""
        config = self._scenario.config
        mix = await training_environments(config, self.environments, {}, {})
        refuse_rewards(config, mix.descriptions)
        await self.publisher.connect()
        if first_version:
            await self.publisher.publish(first_version)
        attempts = Attempts.from_config(config, self.history, num_servers=len(self.engines))
        return LoopParts(
            config=config,
            rules=credit_rules(config, mix, vocab_size=_VOCAB_SIZE),
            packing=Packing(
                seq_len=num_ids(config.trainer.seq_len),
                num_ranks=self.ranks.num_ranks,
                hidden_size=self._scenario.trainer.hidden_size,
                max_tokens=config.rollout.max_tokens,
            ),
            sampler=make_sampler(config, mix, SimulatedPolicies(self.pool, attempts), attempts),
            trainer=self.ranks,
            publisher=self.publisher,
            folder=self.history,
            machine=Machine(
                facts=UNKNOWN_FACTS,
                seq_len=num_ids(config.trainer.seq_len),
                hidden_size=self._scenario.trainer.hidden_size,
                gpu_name=None,
            ),
            first_version=first_version,
            streams_gradients=streams_gradients(config),
        )
