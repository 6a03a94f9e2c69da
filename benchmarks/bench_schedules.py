"""Schedules compared by simulation: the same GPUs, rollouts and model of servers and ranks.

The run's own loop, sampler, pool and publisher work in virtual time. Each schedule divides the GPUs
between servers and ranks as suits it best. Beside them stand two rules of other systems, by the
same simulator: lanes that are always full with too old samples dropped, and one-step-off.
Run: python benchmarks/bench_schedules.py [--quick]
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from machine import facts_of_run, table, write_results
from schedules.rules import KeepLanesFull, KeepLanesFullShort, OneStepOff, with_rule

from telescope_train.config.schema import TrainConfig
from telescope_train.simulation.environments import WORKLOADS
from telescope_train.simulation.run import Scenario, simulate
from telescope_train.simulation.trainer import TrainerSpeed

NUM_GPUS, STEPS, GROUPS, GROUP_SIZE, SEEDS = 16, 16, 48, 8, (0,)
SPLITS = (8, 11, 13, 14)
"""Servers among the GPUs; the others are trainer ranks."""
COMMAND = "python benchmarks/bench_schedules.py"
PAGE = """# Schedules, simulated

{facts}

{gpus} GPUs, batches of {groups} groups x {size} rollouts, {steps} steps, seed 0; the best
division of the GPUs for each schedule. Speed is relative to the synchronous schedule on the same
GPUs. "Length" is the mean length of trained over drawn rollouts: below 1, long answers are trained
on too rarely. "Waste" is the share of sampled tokens that were dropped because they were too old.
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


SCHEDULES = (
    Schedule("synchronous", 0),
    Schedule("synchronous, streamed gradients", 0, True),
    Schedule("`max_async_rollout` 1", 1),
    Schedule("`max_async_rollout` 1, streamed", 1, True),
    Schedule("`max_async_rollout` 2", 2),
    Schedule("`max_async_rollout` 2, streamed", 2, True),
    Schedule("one-step-off", 0, rule=OneStepOff),
    Schedule("full lanes, more than 2 behind dropped", 2, rule=KeepLanesFullShort),
    Schedule("full lanes, more than 8 behind dropped", 8, rule=KeepLanesFull),
)


def scenario(workload: str, schedule: Schedule, servers: int, seed: int, steps: int) -> Scenario:
    """Return one run."""
    config = TrainConfig.model_validate(
        {
            "run": {"name": "simulated", "number_of_steps": steps, "seed": seed},
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
                # The rule that drops keeps lanes for two batches; more would only drop more.
                "max_concurrent_prompts_per_server": max(1, 2 * GROUPS // servers)
                if schedule.rule in (KeepLanesFull, KeepLanesFullShort)
                else 32,
            },
            "trainer": {"seq_len": 40_960},
        }
    )
    found = Scenario(
        config=config,
        workload=WORKLOADS[workload],
        num_servers=servers,
        num_ranks=NUM_GPUS - servers,
        trainer=TrainerSpeed(tokens_per_s=8_000.0),
    )
    return replace(found, adapt=with_rule(schedule.rule)) if schedule.rule else found


def measured(job: tuple[str, int, int, int, int]) -> dict[str, object]:
    """Return the numbers of one run."""
    workload, index, servers, seed, steps = job
    schedule = SCHEDULES[index]
    dropped = []
    one = scenario(workload, schedule, servers, seed, steps)

    def adapt(parts):
        parts = (with_rule(schedule.rule) if schedule.rule else lambda same: same)(parts)
        dropped.append(parts.sampler)
        return parts

    run = simulate(replace(one, adapt=adapt))
    # The first steps fill the pipeline and are left out.
    ends = np.cumsum([row["time/step_s"] for row in run.rows])
    skip = steps // 4
    return {
        "workload": workload,
        "schedule": schedule.name,
        "servers": servers,
        "seed": seed,
        "step_s": float((ends[-1] - ends[skip - 1]) / (steps - skip)),
        "length": run.length_bias,
        "waste": getattr(dropped[0], "num_dropped_tokens", 0) / run.num_tokens,
        "staleness": max(row["staleness/max"] for row in run.rows),
        "server_busy": run.server_busy,
        "trainer_busy": run.trainer_busy,
    }


def best(rows: list[dict]) -> dict:
    """Return the mean over seeds of the fastest division of the GPUs."""
    by_split: dict[int, list[dict]] = {}
    for row in rows:
        by_split.setdefault(row["servers"], []).append(row)
    numbers = ("step_s", "length", "waste", "staleness", "server_busy", "trainer_busy")
    means = [
        {name: float(np.mean([one[name] for one in some])) for name in numbers}
        | {"servers": servers}
        for servers, some in by_split.items()
    ]
    return min(means, key=lambda one: one["step_s"])


def main() -> None:
    """Simulate everything, and write the results unless it is a quick run."""
    is_quick = "--quick" in sys.argv
    steps, splits, seeds = (8, (8, 12), (0,)) if is_quick else (STEPS, SPLITS, SEEDS)
    jobs = [
        (workload, index, servers, seed, steps)
        for workload in WORKLOADS
        for index in range(len(SCHEDULES))
        for servers in splits
        for seed in seeds
    ]
    with ProcessPoolExecutor(max_workers=2) as pool:
        rows = list(pool.map(measured, jobs))
    tables = []
    for workload in WORKLOADS:
        mine = [row for row in rows if row["workload"] == workload]
        chosen = {s.name: best([r for r in mine if r["schedule"] == s.name]) for s in SCHEDULES}
        base = chosen["synchronous"]["step_s"]
        lines = [
            [
                name,
                f"{base / one['step_s']:.2f}x",
                f"{one['length']:.3f}",
                f"{one['waste']:.0%}",
                f"{one['staleness']:.0f}",
                f"{one['servers']} + {NUM_GPUS - one['servers']}",
                f"{one['server_busy']:.0%}, {one['trainer_busy']:.0%}",
            ]
            for name, one in chosen.items()
        ]
        head = ("schedule", "speed", "length", "waste", "most behind", "servers + ranks", "busy")
        tables.append(f"## {workload}\n\n{table(head, lines)}")
        print(tables[-1], flush=True)
    if is_quick:
        return
    page = PAGE.replace("{tables}", "\n\n".join(tables))
    numbers = {"gpus": NUM_GPUS, "groups": GROUPS, "size": GROUP_SIZE, "steps": STEPS}
    for name, value in numbers.items():
        page = page.replace(f"{{{name}}}", str(value))
    write_results("schedules", page, facts_of_run(COMMAND, "telescope-train"), rows)


if __name__ == "__main__":
    main()
