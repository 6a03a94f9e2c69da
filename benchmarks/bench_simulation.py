"""Simulated against real steps on CPU: speeds from one run, step times of others predicted.

A small model is trained for real with several schedules. The first run is measured; what
`telescope simulate --speeds-of` then says about each schedule is compared with its real steps.
Run: python benchmarks/bench_simulation.py
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from machine import facts_of_run, table, write_results
from small_run import ENVIRONMENT, command, make_model

from telescope_core.records import RunFolder
from telescope_train.cluster.ports import free_port

WARM_UP = 5
SCHEDULES = {
    "lockstep": {"max_async_rollout": 0, "stream_gradients": "false"},
    "lockstep, streamed": {"max_async_rollout": 0, "stream_gradients": "true"},
    "one step ahead": {"max_async_rollout": 1, "stream_gradients": "false"},
    "larger batches": {"max_async_rollout": 0, "prompts_batch_size_for_trainer": 16},
    "fewer at a time": {"max_async_rollout": 0, "max_num_seqs": 16},
}
"""The first of them is measured."""
SETTINGS = """
environments = [{{ name = "./share.py:Share" }}]
[run]
name = "{name}"
number_of_steps = {steps}
[model]
model = {model}
[rollout]
group_size = 8
prompts_batch_size_for_trainer = 8
max_tokens = 256
[trainer]
learning_rate = 1e-9
seq_len = 1024
[inference]
inference_base_port = {port}
max_model_len = 512
"""


@dataclass(frozen=True)
class Found:
    """Seconds of a step of one schedule."""

    schedule: str
    real: float
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over real."""
        return self.simulated / self.real


def compare(folder: Path, *, steps: int) -> list[Found]:
    """Train and simulate with each schedule."""
    (folder / "share.py").write_text(ENVIRONMENT)
    settings = SETTINGS.format(
        name="measured", steps=steps, model=json.dumps(str(folder / "model")), port=free_port()
    )
    (folder / "run.toml").write_text(settings)
    found: list[Found] = []
    for schedule, values in SCHEDULES.items():
        name = schedule.replace(", ", "-").replace(" ", "-")
        flags = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        command("train", folder, ["--run.name", name, *flags])
        rows = RunFolder(folder / "runs" / name).metrics()
        if not found:
            measured = str(folder / "runs" / name)
        said = command(
            "simulate",
            folder,
            [
                *("--gpus", "2", "--servers", "1", "--steps", str(steps), "--json"),
                *("--speeds-of", measured, "--lengths-of", measured, *flags),
            ],
        )
        real = statistics.fmean(row["time/step_s"] for row in rows[WARM_UP:])
        found.append(Found(schedule, real, json.loads(said)["chosen"]["step_s"]))
        one = found[-1]
        print(
            f"{schedule:<20} real {one.real:6.3f} s, simulated {one.simulated:6.3f} s, "
            f"ratio {one.ratio:.2f}",
            flush=True,
        )
    return found


PAGE = """# Simulated steps beside real ones

A model of 2M parameters, one vLLM server and one trainer rank on CPU, {steps} steps of each
schedule. Speeds and lengths were measured in the first run alone (`simulate --speeds-of`).

{table}

{{facts}}
"""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description="Simulated steps beside real ones, on CPU.")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    options = parser.parse_args()
    steps = 12 if options.quick else options.steps
    facts = facts_of_run(f"python benchmarks/bench_simulation.py --steps {steps}", "torch")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        found = compare(Path(folder), steps=steps)
    rows = [
        [one.schedule, f"{one.real:.3f} s", f"{one.simulated:.3f} s", f"{one.ratio:.2f}"]
        for one in found
    ]
    head = ["schedule", "real step", "simulated step", "simulated / real"]
    page = PAGE.format(steps=steps, table=table(head, rows))
    if not options.quick:
        write_results("simulation", page, facts, [asdict(one) for one in found])


if __name__ == "__main__":
    main()
