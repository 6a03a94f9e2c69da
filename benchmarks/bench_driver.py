"""Processor time of the driver, per token and per rollout of 40 turns, beside the state before.

Each side is a process with the packages of one checkout; sides take turns. Run:
python benchmarks/bench_driver.py --model FOLDER [--before CHECKOUT]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from machine import facts_of_run, table, write_results

HERE = Path(__file__).parent
ROUNDS = 3
NOTE = """\
# Driver time of a rollout

What the driver computes for the tokens of rollouts, medians of {rounds} runs of each side, which
take turns. `before` is a checkout of the state before. Replies of a chat endpoint are 28 kB of JSON
for 256 tokens; a frame of the token plane, through which training gets its tokens, has columns.

A rollout has 40 turns and about 33k tokens, with a tokenizer and a template of {model}: questions
of 8 tokens and answers of 819, or questions of 400 and answers of 410. In `grows` the caller sends
back what was said, in `rewritten` half of each answer, so that every turn is a training sample of
its own, and each prompt is rendered anew. `play` is all that the policy does for 40 turns: render,
encode, decode, compare and record; the server is in memory. `the tokenizer alone` is what its
library takes to encode the questions and to decode the answers once, which no design avoids.

{facts}
"""


def run_side(checkout: Path, model: Path) -> dict[str, float]:
    """Return what a process with the packages of `checkout` measures."""
    sources = [str(one) for one in sorted(checkout.glob("packages/*/src"))]
    done = subprocess.run(
        [sys.executable, "-m", "driver.stages", str(model)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), *sources]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--before", type=Path, help="a checkout of the state before")
    chosen = parser.parse_args()
    facts = facts_of_run("python benchmarks/bench_driver.py", "msgspec", "numpy", "transformers")
    sides = {"now": HERE.parent} | ({"before": chosen.before} if chosen.before else {})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, checkout in sides.items():
            runs[name].append(run_side(checkout.resolve(), chosen.model.resolve()))
    rows = [
        {"stage": stage}
        | {name: statistics.median(run[stage] for run in found) for name, found in runs.items()}
        for stage in runs["now"][0]
    ]
    cells = [[row["stage"], *(f"{row[name]:.3f}" for name in reversed([*sides]))] for row in rows]
    page = [
        NOTE.format(rounds=ROUNDS, model=chosen.model.name, facts="{facts}"),
        table(["stage", *reversed([*sides])], cells),
    ]
    print(page[1])
    write_results("driver", "\n".join(page), facts, rows)


if __name__ == "__main__":
    main()
