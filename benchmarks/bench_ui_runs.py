"""`telescope ui` on a folder of many runs: the first page, before and after anything was read.

Writes `--runs` runs of `--steps` steps with 130 metrics each into a temporary folder, a quarter of
them as sweeps of four seeds, starts `telescope ui` on it as a process of its own, and asks for `/`
over loopback. Server time is what the process computed for one answer, by its own processor clock.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_ui import Server, serving, took
from machine import facts_of_run, table, write_results

from telescope_core.records.run_folder import RunFolder

TIMES = 20
LIMIT_MS = 500
NUM_METRICS = 130
PAGE = """# The list of many runs in `telescope ui`

{facts}

A folder of {runs} runs of {steps} steps with {num_metrics} metrics each ({size_mb:.0f} MB of
metrics). Answers over loopback as JSON ({answer_kb:.0f} kB), median of {times}; processor time is
of the process that serves.

{table}
"""


def write_runs(folder: Path, num: int, steps: int) -> None:
    rng = np.random.default_rng(0)
    names = [f"metric/{number}" for number in range(NUM_METRICS - 2)]
    for at in range(num):
        sweep, seed = divmod(at, 4)
        name = f"sweep{sweep}-seed{seed}" if at < num // 4 else f"run-{at}"
        config = {
            "run": {"name": name, "number_of_steps": steps},
            "model": {"model": f"model-{at % 3}"},
            "algorithm": {"algorithm": "grpo"},
            "environments": [{"name": "math"}, {"name": "code"}],
        }
        run = RunFolder.create(folder / name, config=config)
        values = rng.random((steps, len(names)))
        with (run.path / "metrics.jsonl").open("w") as stream:
            for step, row in enumerate(values.tolist(), start=1):
                own = {"task_reward/mean": step / steps, "reward/mean": step / steps}
                stream.write(
                    json.dumps({"step": step, **own, **dict(zip(names, row, strict=True))})
                )
                stream.write("\n")
        run.finish()


def one_answer(server: Server) -> tuple[float, float]:
    """Return the milliseconds of one answer, and those of processor time of the server."""
    one = took(server, lambda: server.ask("/"))
    return 1000 * one.s, 1000 * one.cpu_s


def ask_until_read(server: Server) -> None:
    while not server.ask("/")["index"]["is_complete"]:
        pass


def medians(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def measure(folder: Path, runs: int, steps: int) -> dict[str, Any]:
    write_runs(folder / "runs", runs, steps)
    sizes = [path.stat().st_size for path in folder.rglob("metrics.jsonl")]
    with serving(folder / "runs", folder / "cache") as server:
        # Of the process: modules that the first answer of all loads.
        server.ask("/compare?run=run-150&run=run-151" if runs > 151 else "/")
        first = one_answer(server)
        rest = took(server, lambda: ask_until_read(server))
        again = medians([one_answer(server) for _ in range(TIMES)])
        changed: list[tuple[float, float]] = []
        for step in range(TIMES):
            run = RunFolder(folder / "runs" / "sweep0-seed0")
            run.log_metrics({"step": steps + step + 1, "task_reward/mean": 0.5})
            changed.append(one_answer(server))
        answer = server.ask("/")
    assert len(answer["runs"]) == runs
    return {
        **{"runs": runs, "steps": steps, "size_mb": sum(sizes) / 1e6, "times": TIMES},
        **{"num_metrics": NUM_METRICS, "answer_kb": len(json.dumps(answer)) / 1e3},
        "rows": [
            {
                "name": "the first answer, with what was read until then",
                "ms": first[0],
                "cpu_ms": first[1],
            },
            {
                "name": "after it, until all metrics are read",
                "ms": 1000 * rest.s,
                "cpu_ms": 1000 * rest.cpu_s,
                "limit": "-",
            },
            {"name": "every further answer", "ms": again[0], "cpu_ms": again[1]},
            {
                "name": "after one run wrote a step",
                **dict(zip(("ms", "cpu_ms"), medians(changed), strict=True)),
            },
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-ui-runs-") as temporary:
        found = measure(Path(temporary), arguments.runs, arguments.steps)
    rows = [
        (one["name"], f"{one['ms']:.0f}", f"{one['cpu_ms']:.0f}", one.get("limit", f"{LIMIT_MS}"))
        for one in found["rows"]
    ]
    shown = table(("answer", "ms", "processor ms", "at most"), rows)
    page = PAGE.replace("{facts}", "{{facts}}").format(**{**found, "table": shown})
    command = f"python benchmarks/bench_ui_runs.py --runs {arguments.runs}"
    print(page.replace("{facts}", ""))
    if (arguments.runs, arguments.steps) == (200, 500):
        numbers = {name: value for name, value in found.items() if name != "rows"}
        facts = facts_of_run(command, "msgspec", "fastapi", "uvicorn")
        write_results("ui-runs", page, facts, [{"name": "the folder", **numbers}, *found["rows"]])


if __name__ == "__main__":
    main()
