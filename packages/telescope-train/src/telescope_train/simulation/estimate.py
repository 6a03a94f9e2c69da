"""Estimate a run on machines that are not available: `telescope simulate`.

The chosen division of the GPUs between servers and ranks is simulated, and a few others beside it.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from telescope_core.base.errors import ConfigError
from telescope_core.records import RolloutRow, RunFolder
from telescope_train.config.schema import TrainConfig
from telescope_train.models.device import usable_cores
from telescope_train.simulation.environments import Recorded, SimulatedCall, Workload
from telescope_train.simulation.machines import Speeds
from telescope_train.simulation.run import Scenario, Simulated, Usage, simulate

OnStep: TypeAlias = Callable[[int], None]
"""Called with the number of each step that ends."""
Result = TypeVar("Result")

_POLL_S = 0.5
_steps: "SimpleQueue[int] | None" = None
"""In a simulating process: the queue for steps. Set once, at its start."""
_OTHER_SPLITS = (0.5, 0.75, 1.25, 1.5)
"""Numbers of servers, relative to the chosen one, that are simulated as well."""
_FEW_ROLLOUTS = 20_000
"""Total number of rollouts that is simulated within seconds in one process."""
_WARM_UP = 3
"""Initial steps that are left out of means: nothing overlaps with the first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines of a simulated run."""

    num_gpus: int
    """Total number of GPUs."""
    num_servers: int
    gpus_per_server: int = 1
    """Number of GPUs that share the layers of one server (tensor parallelism)."""

    @property
    def num_ranks(self) -> int:
        """Number of GPUs that are left for the trainer."""
        return self.num_gpus - self.num_servers * self.gpus_per_server

    def require_sound(self) -> None:
        """Raise ConfigError if servers or trainer have no GPU."""
        if self.num_servers < 1 or self.num_ranks < 1:
            raise ConfigError(
                f"{self.num_servers} servers of {self.gpus_per_server} GPUs leave "
                f"{self.num_ranks} of {self.num_gpus} GPUs for the trainer; expected at least one "
                "server and one GPU for the trainer"
            )


SpeedsOf: TypeAlias = Callable[[Hardware], Speeds]
"""Function that returns the speeds of a server and of a rank for a division of the GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected results of one division of the GPUs. Means leave out the first steps."""

    num_servers: int
    num_ranks: int
    step_s: float
    """Seconds between two optimizer steps."""
    steps_per_hour: float
    servers_idle: float
    """Share of the time in which servers are idle."""
    trainer_idle: float
    staleness_mean: float
    """Weight updates between the first token of a sample and its training."""
    staleness_max: float
    groups_ready: float
    """Groups that are ready when the trainer takes its batch."""
    rollouts_waiting: float
    """Rollouts that wait for a slot at that time."""
    num_preemptions: int
    generate_s: float
    """Seconds of a step in which the trainer waits for rollouts."""
    train_s: float
    sync_s: float

    @classmethod
    def from_simulated(cls, found: Simulated, hardware: Hardware) -> "Expected":
        """Return the expected results from the simulation `found`."""
        rows = found.rows[min(_WARM_UP, len(found.rows) - 1) :]

        def mean(name: str) -> float:
            return float(np.mean([row.get(name, 0.0) for row in rows]))

        return cls(
            num_servers=hardware.num_servers,
            num_ranks=hardware.num_ranks,
            step_s=mean("time/step_s"),
            steps_per_hour=3600.0 / mean("time/step_s"),
            servers_idle=1.0 - found.server_busy,
            trainer_idle=max(0.0, 1.0 - found.trainer_busy),
            staleness_mean=mean("staleness/mean"),
            staleness_max=max(row.get("staleness/max", 0.0) for row in rows),
            groups_ready=mean("queue/groups_ready"),
            rollouts_waiting=mean("queue/rollouts_waiting"),
            num_preemptions=found.num_preemptions,
            generate_s=mean("time/generate_s"),
            train_s=mean("time/train_s"),
            sync_s=mean("time/sync_s"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One step of a simulated run, including the first ones."""

    ended_s: float
    staleness_mean: float
    staleness_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The course of a simulated run over time."""

    usage: tuple[Usage, ...]
    steps: tuple[StepTaken, ...]

    @classmethod
    def from_simulated(cls, found: Simulated) -> "Course":
        """Return the course of `found`."""
        steps = tuple(
            StepTaken(
                ended_s=ended_s,
                staleness_mean=row.get("staleness/mean", 0.0),
                staleness_max=row.get("staleness/max", 0.0),
            )
            for ended_s, row in zip(found.ended_s, found.rows, strict=True)
        )
        return cls(usage=found.usage, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The chosen division of the GPUs, and others for comparison."""

    chosen: Expected
    course: Course
    """Course of the chosen division."""
    others: tuple[Expected, ...]
    """Sorted by the number of servers."""
    limit: str
    """The bottleneck of a step."""

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as JSON."""
        return asdict(self)


def estimate(
    config: TrainConfig,
    speeds: SpeedsOf,
    hardware: Hardware,
    workload: Workload,
    *,
    steps: int,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Estimate:
    """Simulate `steps` steps of the run on `hardware`, also with other numbers of servers.

    `on_progress` gets the steps that are done and all there are, about twice a second.
    """
    hardware.require_sound()
    run = config.run.model_copy(update={"number_of_steps": steps})
    config = config.model_copy(update={"run": run})
    splits = [hardware, *_other_splits(hardware)]
    works = [partial(_simulated, config, speeds(split), split, workload) for split in splits]
    (chosen, course), *others = all_of(
        works,
        in_processes=_num_rollouts(config) * steps * len(works) > _FEW_ROLLOUTS,
        on_progress=lambda done: on_progress(done, steps * len(works)),
    )
    return Estimate(
        chosen=chosen,
        course=course,
        others=tuple(expected for expected, _ in others),
        limit=_limit(chosen),
    )


def recorded_workload(run_folder: Path, like: Workload) -> Recorded:
    """Return rollouts as in `run_folder`, with the times of `like`.

    Raises ConfigError if there is no run, or it has no rollouts with tokens.
    """
    rows = RunFolder.open(run_folder).rollouts()
    rollouts = [calls for row in rows if (calls := _calls(row))]
    if not rollouts:
        raise ConfigError(f"{run_folder} has no rollouts with recorded tokens to learn from")
    return Recorded(
        lengths=like.lengths,
        tool_s=like.tool_s,
        reward_s=float(np.mean([row.score_s for row in rows])),
        rollouts=rollouts,
    )


def _calls(row: RolloutRow) -> list[SimulatedCall]:
    calls: list[SimulatedCall] = []
    known = 0
    for tokens in row.tokens or ():
        if tokens is None:
            continue
        calls.append(SimulatedCall(max(1, tokens.prompt_end - known), tokens.num_completion_ids))
        known = tokens.prompt_end + tokens.num_completion_ids
    return calls


def _other_splits(hardware: Hardware) -> list[Hardware]:
    numbers = {round(hardware.num_servers * factor) for factor in _OTHER_SPLITS}
    most = (hardware.num_gpus - 1) // hardware.gpus_per_server
    possible = sorted(n for n in numbers if 1 <= n <= most and n != hardware.num_servers)
    return [replace(hardware, num_servers=number) for number in possible]


def _num_rollouts(config: TrainConfig) -> int:
    return config.rollout.prompts_batch_size_for_trainer * config.largest_group


def _simulated(
    config: TrainConfig, speeds: Speeds, hardware: Hardware, workload: Workload, on_step: OnStep
) -> tuple[Expected, Course]:
    scenario = Scenario(
        config=config,
        workload=workload,
        num_servers=hardware.num_servers,
        num_ranks=hardware.num_ranks,
        engine=speeds.engine,
        servers=speeds.servers,
        trainer=speeds.trainer,
        on_step=on_step,
    )
    found = simulate(scenario)
    return Expected.from_simulated(found, hardware), Course.from_simulated(found)


def _limit(expected: Expected) -> str:
    parts = {
        "rollouts: the trainer waits for them": expected.generate_s,
        "training": expected.train_s,
        "publishing weights": expected.sync_s,
    }
    return max(parts, key=lambda name: parts[name])


def table_of(estimate: Estimate) -> Sequence[Expected]:
    """Return all simulated divisions, by their number of servers."""
    return sorted([estimate.chosen, *estimate.others], key=lambda one: one.num_servers)


def all_of(
    works: Sequence[Callable[[OnStep], Result]],
    *,
    in_processes: bool,
    on_progress: Callable[[int], None],
) -> list[Result]:
    """Return the results of all `works`, in order; they must be picklable if processes are used.

    `on_progress` gets the number of steps that all of them have done: now and then, also while
    none is done.
    """
    if in_processes:
        return _in_processes(works, on_progress)
    num_done = 0

    def count(step: int) -> None:
        nonlocal num_done
        num_done += 1
        on_progress(num_done)

    return [work(count) for work in works]


def _in_processes(
    works: Sequence[Callable[[OnStep], Result]], on_progress: Callable[[int], None]
) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    steps: SimpleQueue[int] = context.SimpleQueue()
    num_done = 0
    num_workers = min(len(works), usable_cores())
    with ProcessPoolExecutor(
        num_workers, mp_context=context, initializer=_begin, initargs=(steps,)
    ) as processes:
        futures = [processes.submit(partial(work, _tell)) for work in works]
        left = set(futures)
        while left:
            left = wait(left, timeout=_POLL_S, return_when=FIRST_COMPLETED).not_done
            while not steps.empty():
                steps.get()
                num_done += 1
            on_progress(num_done)
        return [future.result() for future in futures]


def _begin(steps: "SimpleQueue[int]") -> None:
    global _steps
    _steps = steps


def _tell(step: int) -> None:
    assert _steps is not None, "the process was started without a queue"
    _steps.put(step)
