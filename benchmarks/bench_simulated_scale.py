"""Simulated runs of up to 10,000 servers: seconds and memory that the simulation itself takes.

Run: python benchmarks/bench_simulated_scale.py
"""

import argparse
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass

from machine import facts_of_run, table, write_results

from telescope_train.config.schema import TrainConfig
from telescope_train.simulation.environments import Workload, lognormal
from telescope_train.simulation.run import Scenario, simulate

GROUP_SIZE = 8


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    num_servers: int
    num_rollouts: int
    """Of one step."""
    steps: int


CASES = [
    Case(10_000, 1024, 1000),
    Case(1000, 1024, 100),
    Case(100, 1024, 100),
    Case(10_000, 16_384, 3),
]
_TELL_EVERY = 20
"""Steps."""


@dataclass(frozen=True)
class Found:
    """What a simulation took, and what came of it."""

    num_servers: int
    num_rollouts: int
    steps: int
    real_s: float
    cpu_s: float
    memory_mb: float
    """Most that the process held."""
    virtual_s: float
    step_s: float
    """Virtual seconds of a step."""
    history: str
    """Digest of all rollouts and their times: the same in every run."""


def tell(step: int) -> None:
    """Say how far a simulation is."""
    if step % _TELL_EVERY == 0:
        print(f"{step} steps, {time.process_time():.0f} s of CPU", flush=True)


def scenario(case: Case) -> Scenario:
    """Return a run of one step ahead, with answers of 1,000 tokens on average."""
    config = TrainConfig.model_validate(
        {
            "run": {"name": "scale", "number_of_steps": case.steps, "seed": 0},
            "model": {"model": "none"},
            "environments": [{"name": "simulated"}],
            "rollout": {
                "group_size": GROUP_SIZE,
                "prompts_batch_size_for_trainer": case.num_rollouts // GROUP_SIZE,
                "max_tokens": 8192,
                "rollout_timeout_s": 36_000.0,
            },
            "scheduling": {"max_async_rollout": 1},
            "trainer": {"seq_len": 65_536},
        }
    )
    return Scenario(
        config=config,
        workload=Workload(lengths=lognormal(1000, 0.9)),
        num_servers=case.num_servers,
        num_ranks=256,
        on_step=tell,
    )


def measured(case: Case) -> Found:
    """Simulate a case, in a process of its own."""
    began_cpu_s = time.process_time()
    result = simulate(scenario(case))
    return Found(
        **asdict(case),
        real_s=round(result.real_s, 1),
        cpu_s=round(time.process_time() - began_cpu_s, 1),
        memory_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        virtual_s=round(result.duration_s, 1),
        step_s=round(result.step_s, 3),
        history=result.history,
    )


PAGE = """# Simulated runs with many servers

The loop, the sampler, the pool and the publisher of a run in virtual time, one process. All
servers get new weights after every step, whether they have work or not. CPU seconds are
those of the process; real seconds depend on what else the machine does.

{table}

{{facts}}
"""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="What simulations of many servers take.")
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    parser.add_argument("--most-steps", type=int, help="of each simulation; default: all")
    options = parser.parse_args()
    most = 3 if options.quick else options.most_steps
    limit = "" if most is None else f" --most-steps {most}"
    facts = facts_of_run(f"python benchmarks/bench_simulated_scale.py{limit}")
    found: list[Found] = []
    for case in CASES:
        steps = case.steps if most is None else min(case.steps, most)
        with multiprocessing.get_context("spawn").Pool(1) as processes:
            limited = Case(case.num_servers, case.num_rollouts, steps)
            found.append(processes.apply(measured, [limited]))
        print(found[-1], flush=True)
    head = ["servers", "rollouts a step", "steps", "real", "CPU", "CPU a step", "virtual", "memory"]
    rows = [
        [
            f"{one.num_servers:,}",
            f"{one.num_rollouts:,}",
            f"{one.steps:,}",
            f"{one.real_s:,.0f} s",
            f"{one.cpu_s:,.0f} s",
            f"{one.cpu_s / one.steps:.2f} s",
            f"{one.virtual_s:,.0f} s",
            f"{one.memory_mb:,.0f} MB",
        ]
        for one in found
    ]
    if not options.quick:
        write_results(
            "simulated_scale",
            PAGE.format(table=table(head, rows)),
            facts,
            [asdict(one) for one in found],
        )


if __name__ == "__main__":
    main()
