"""Schedules compared by simulation: the same GPUs, rollouts and model of servers and ranks.

The run's own loop, sampler, pool and publisher work in virtual time. Each schedule divides the GPUs
between servers and ranks as suits it best; rules that keep slots full have as many as suit them
best. Beside them stand two rules of other systems, by the same simulator: slots that are always
full with too old samples dropped, and one-step-off.
Run: python benchmarks/bench_schedules.py [--quick] [--workloads reasoning ...]
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from machine import RESULTS, facts_of_run, table, write_results
from schedules.rules import (
    KeepSlotsFull,
    KeepSlotsFullShort,
    OneStepOff,
    counting_what_is_replaced,
    with_rule,
)

from telescope_train.config.schema import TrainConfig
from telescope_train.simulation.environments import WORKLOADS
from telescope_train.simulation.run import Scenario, simulate
from telescope_train.simulation.trainer import TrainerSpeed

NUM_GPUS, STEPS, GROUPS, GROUP_SIZE, SEEDS = 16, 16, 48, 8, (0,)
SPLITS = (8, 11, 13, 14)
"""Servers among the GPUs; the others are trainer ranks."""
BATCHES_OPEN = (1, 2, 3, 5, 8)
"""Batches for which a rule that keeps slots full has slots; ours opens what its bound admits."""
COMMAND = "python benchmarks/bench_schedules.py"
PAGE = """# Schedules, simulated

{facts}

{gpus} GPUs, batches of {groups} groups x {size} rollouts, {steps} steps, seed 0; the best
division of the GPUs for each schedule; for the rules that keep slots full also the best number of
slots, of those for {open} batches. "Steps" and "tokens" are optimizer steps and trained tokens per
hour, relative to the synchronous schedule on the same GPUs. "Length" is the mean length of trained
over drawn rollouts: below 1, long answers are trained on too rarely, and steps are shorter for that
alone. "Waste" is the share of sampled tokens that were dropped because they were too old.
The last three rules are those of other systems.

{tables}
"""


@dataclass(frozen=True)
class Schedule:
    """One way to schedule a run."""

    name: str
    ahead: int
    streams: bool = False
    rule: type | None = None
    order: str = "drawn"
    """Which groups our own rule trains on: those that were drawn, or those that ended first."""

    @property
    def keeps_slots_full(self) -> bool:
        """Whether slots, and not batches, decide how much is sampled."""
        return self.rule is not None and issubclass(self.rule, KeepSlotsFull)


SCHEDULES = (
    Schedule("synchronous", 0),
    Schedule("synchronous, streamed gradients", 0, True),
    Schedule("`max_async_rollout` 1", 1),
    Schedule("`max_async_rollout` 1, streamed", 1, True),
    Schedule("`max_async_rollout` 2", 2),
    Schedule("`max_async_rollout` 2, streamed", 2, True),
    Schedule(
        '`max_async_rollout` 2, streamed, `batch_order` "finished"', 2, True, order="finished"
    ),
    Schedule("`max_async_rollout` 8, streamed", 8, True),
    Schedule("one-step-off", 0, rule=OneStepOff),
    Schedule("full lanes, more than 2 behind dropped", 2, rule=KeepSlotsFullShort),
    Schedule("full lanes, more than 8 behind dropped", 8, rule=KeepSlotsFull),
)


@dataclass(frozen=True)
class Job:
    """One run to simulate."""

    workload: str
    schedule: int
    """Which of `SCHEDULES`."""
    servers: int
    steps: int
    seed: int = 0
    batches_open: int | None = None


def scenario(job: Job) -> Scenario:
    """Return one run."""
    schedule = SCHEDULES[job.schedule]
    slots_of = job.batches_open * GROUPS // job.servers if job.batches_open else 32
    config = TrainConfig.model_validate(
        {
            "run": {"name": "simulated", "number_of_steps": job.steps, "seed": job.seed},
            "model": {"model": "none"},
            "environments": [{"name": "simulated"}],
            "rollout": {
                "group_size": GROUP_SIZE,
                "prompts_batch_size_for_trainer": GROUPS,
                "max_tokens": 32_768,
                "rollout_timeout_s": 360_000.0,
            },
            "scheduling": {
                "max_async_rollout": schedule.ahead,
                "stream_gradients": "auto" if schedule.streams else False,
                "max_concurrent_prompts_per_server": max(1, slots_of),
                "batch_order": schedule.order,
                "max_off_policy_steps": schedule.ahead if schedule.order == "finished" else -1,
            },
            "trainer": {"seq_len": 40_960},
        }
    )
    found = Scenario(
        config=config,
        workload=WORKLOADS[job.workload],
        num_servers=job.servers,
        num_ranks=NUM_GPUS - job.servers,
        trainer=TrainerSpeed(tokens_per_s=8_000.0),
    )
    return replace(found, adapt=with_rule(schedule.rule)) if schedule.rule else found


def measured(job: Job) -> dict[str, object]:
    """Return the numbers of one run."""
    schedule = SCHEDULES[job.schedule]
    samplers = []
    one = scenario(job)

    def adapt(parts):
        parts = (
            with_rule(schedule.rule)(parts) if schedule.rule else counting_what_is_replaced(parts)
        )
        samplers.append(parts.sampler)
        return parts

    run = simulate(replace(one, adapt=adapt))
    # The first steps fill the pipeline and are left out.
    ends = np.cumsum([row["time/step_s"] for row in run.rows])
    skip = job.steps // 4
    return {
        "workload": job.workload,
        "schedule": schedule.name,
        "servers": job.servers,
        "seed": job.seed,
        "batches_open": job.batches_open,
        "step_s": float((ends[-1] - ends[skip - 1]) / (job.steps - skip)),
        "length": run.length_bias,
        "waste": getattr(samplers[0], "num_dropped_tokens", 0) / run.num_tokens,
        "staleness": max(row["staleness/max"] for row in run.rows),
        "server_busy": run.server_busy,
        "trainer_busy": run.trainer_busy,
    }


def best(rows: list[dict]) -> dict:
    """Return the mean over seeds of the fastest division of the GPUs, with the best slots."""
    by_split: dict[tuple[int, int | None], list[dict]] = {}
    for row in rows:
        by_split.setdefault((row["servers"], row["batches_open"]), []).append(row)
    numbers = ("step_s", "length", "waste", "staleness", "server_busy", "trainer_busy")
    means = [
        {name: float(np.mean([one[name] for one in some])) for name in numbers}
        | {"servers": servers, "batches_open": batches_open}
        for (servers, batches_open), some in by_split.items()
    ]
    return min(means, key=lambda one: one["step_s"])


def jobs_of(workloads: list[str], *, is_quick: bool) -> list[Job]:
    """Return every run of these workloads."""
    steps, splits = (8, (8, 12)) if is_quick else (STEPS, SPLITS)
    return [
        Job(workload, index, servers, steps, seed, batches_open)
        for workload in workloads
        for index, schedule in enumerate(SCHEDULES)
        for batches_open in (BATCHES_OPEN if schedule.keeps_slots_full else (None,))
        for servers in splits
        for seed in SEEDS
    ]


def known_rows(workload: str) -> list[dict]:
    """Return what an earlier run has written of a workload, if it is of the same schedules."""
    path = RESULTS / "schedules.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    mine = [one for one in rows if one["workload"] == workload]
    is_same = {one["schedule"] for one in mine} == {one.name for one in SCHEDULES}
    return mine if is_same and all("batches_open" in one for one in mine) else []


def lines_of(rows: list[dict]) -> list[list[str]]:
    """Return the lines of the table of one workload."""
    chosen = {s.name: best([r for r in rows if r["schedule"] == s.name]) for s in SCHEDULES}
    base = chosen["synchronous"]["step_s"]
    return [
        [
            name,
            f"{base / one['step_s']:.2f}x",
            f"{base / one['step_s'] * one['length']:.2f}x",
            f"{one['length']:.3f}",
            f"{one['waste']:.0%}",
            f"{one['staleness']:.0f}",
            f"{one['servers']} + {NUM_GPUS - one['servers']}",
            str(one["batches_open"] or ""),
            f"{one['server_busy']:.0%}, {one['trainer_busy']:.0%}",
        ]
        for name, one in chosen.items()
    ]


def main() -> None:
    """Simulate what is asked for, and write it beside what is known of other workloads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few steps; writes nothing")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    options = parser.parse_args()
    with ProcessPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(measured, jobs_of(options.workloads, is_quick=options.quick)))
    if not options.quick:
        others = [one for one in WORKLOADS if one not in options.workloads]
        rows += [row for workload in others for row in known_rows(workload)]
    head = ("schedule", "steps", "tokens", "length", "waste", "most behind", "servers + ranks")
    head += ("batches open", "busy")
    tables: list[str] = []
    for workload in WORKLOADS:
        if mine := [row for row in rows if row["workload"] == workload]:
            tables.append(f"## {workload}\n\n{table(head, lines_of(mine))}")
            print(tables[-1], flush=True)
    if options.quick:
        return
    page = PAGE.replace("{tables}", "\n\n".join(tables))
    numbers = {"gpus": NUM_GPUS, "groups": GROUPS, "size": GROUP_SIZE, "steps": STEPS}
    numbers["open"] = ", ".join(map(str, BATCHES_OPEN))
    for name, value in numbers.items():
        page = page.replace(f"{{{name}}}", str(value))
    write_results("schedules", page, facts_of_run(COMMAND, "telescope-train"), rows)


if __name__ == "__main__":
    main()
