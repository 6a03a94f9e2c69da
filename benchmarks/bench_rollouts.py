"""Rollouts per second of Telescope and of verifiers against one mock chat endpoint, in turns.

Both sides play the same single-turn problems, ask for token ids and log-probs of 256 tokens, and
score the answer. Each run is a process of its own, and so is the endpoint, which answers from
memory. verifiers is installed into virtual environments that are removed afterwards; the index
is that of pip and uv. Run: python benchmarks/bench_rollouts.py [--quick]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from machine import facts_of_run, table, write_results
from rollouts.problems import MEAN_REWARD, NUM_PROBLEMS

HERE = Path(__file__).parent
CLASSIC, PRESENT = "0.3.1", "0.4.0"
"""The last release of verifiers with SingleTurnEnv, and the one after it that starts a process for
each rollout."""
CONCURRENCIES = (64, 256, 1024)
REPEATS = 3
TARGET_PER_S, TARGET_RATIO = 1500, 5
COMMAND = "python benchmarks/bench_rollouts.py"
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One contender."""

    name: str
    module: str
    python: Path
    fewest: int
    """Rollouts of a run, or as many as are concurrent."""


@contextmanager
def mock_server() -> Generator[str, None, None]:
    """Yield the base URL of a fresh mock endpoint."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollouts.mock_server"],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "it was asked for"
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    finally:
        process.communicate(timeout=10)


def run_side(side: Side, concurrency: int, num_rollouts: int) -> dict[str, float]:
    """Play `num_rollouts` in a process of their own; returns what it measured."""
    with mock_server() as base_url:
        done = subprocess.run(
            [side.python, "-m", side.module, base_url, str(concurrency), str(num_rollouts)],
            cwd=HERE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["num_scored"] != num_rollouts or abs(found["mean_reward"] - MEAN_REWARD) > 1e-6:
        raise SystemExit(f"{side.name}: {num_rollouts} rollouts at {MEAN_REWARD} owed, got {found}")
    found["per_s"] = num_rollouts / found["seconds"]
    return found


def make_peer(folder: Path, release: str) -> Path:
    """Install verifiers into a virtual environment of its own and return its interpreter."""
    uv = Path(sys.executable).with_name("uv")
    place = folder / f"verifiers-{release}"
    python = place / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, place], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", python, f"verifiers=={release}"]
    subprocess.run(install, check=True)
    return python


def take_turns(sides: list[Side], concurrency: int, repeats: int) -> list[dict]:
    """Run the sides alternately; returns one row each with medians."""
    runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for repeat in range(repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            runs[side.name].append(run_side(side, concurrency, max(side.fewest, concurrency)))
    return [
        {
            "side": name,
            "concurrency": concurrency,
            "rollouts": found[0]["num_scored"],
            "per_s": statistics.median(run["per_s"] for run in found),
            "best_per_s": max(run["per_s"] for run in found),
            "cpu_ms": statistics.median(
                1e3 * run.get("cpu_s", 0.0) / run["num_scored"] for run in found
            ),
        }
        for name, found in runs.items()
    ]


HEAD = ("side", "concurrent", "rollouts", "rollouts/s", "best run", "CPU ms per rollout", "ratio")


def as_cells(row: dict) -> list[str]:
    """Return one line of the table."""
    return [
        *(row["side"], str(row["concurrency"]), str(row["rollouts"])),
        *(f"{row['per_s']:,.1f}", f"{row['best_per_s']:,.1f}"),
        f"{row['cpu_ms']:.2f}" if row["cpu_ms"] else "-",
        f"{row['ratio']:.1f}x" if "ratio" in row else "",
    ]


NOTE = f"""\
# Rollouts per second

Single-turn sums with an exact reward, against a chat endpoint in a process of its own that answers
from memory with 256 tokens, their ids and log-probs (25 kB of JSON). The same {NUM_PROBLEMS}
problems on both sides, asked for in the same order; every fourth answer is wrong, and the mean
reward of each run is checked.

Telescope is `run_eval` over `ChatClient(with_tokens=True)`, in one process, rewards in threads as
they are by default. verifiers {CLASSIC} is `SingleTurnEnv.generate` with independent scoring, the
last release with that API. Its runs are shorter, as it is slow: at 256 rollouts they hold fixed
costs of its start, so that 1,024 is the row to compare by. verifiers {PRESENT} plays the same
problems as a taskset with its `null` harness in its subprocess runtime, which starts a program
for each rollout, so few are measured. The sides take turns, each run in a process of its
own; medians of {REPEATS} runs.
`ratio` is Telescope's rollouts/s over that side's. The goal is {TARGET_PER_S:,}/s and
{TARGET_RATIO}x of {CLASSIC}.

{{facts}}
"""


def measure(folder: Path, *, quick: bool) -> list[dict]:
    """Return the rows of all runs."""
    python = Path(sys.executable)
    ours = Side(
        name="Telescope", module="rollouts.ours", python=python, fewest=256 if quick else 2048
    )
    classic = Side(
        name=f"verifiers {CLASSIC}",
        module="rollouts.verifiers_peer",
        python=make_peer(folder, CLASSIC),
        fewest=256,
    )
    present = Side(
        name=f"verifiers {PRESENT}",
        module="rollouts.verifiers_v1",
        python=make_peer(folder, PRESENT),
        fewest=4 if quick else 16,
    )
    rows: list[dict] = []
    for concurrency in CONCURRENCIES[:1] if quick else CONCURRENCIES:
        group = take_turns([ours, classic], concurrency, 1 if quick else REPEATS)
        rows += with_ratios(group)
        print(*(" | ".join(as_cells(row)) for row in group), sep="\n", flush=True)
    few = take_turns([present], 4, 1)
    few[0]["ratio"] = rows[0]["per_s"] / few[0]["per_s"]
    print(" | ".join(as_cells(few[0])), flush=True)
    return [*rows, *few]


def with_ratios(rows: list[dict]) -> list[dict]:
    """Note in each peer's row how much faster the first row is."""
    for row in rows[1:]:
        row["ratio"] = rows[0]["per_s"] / row["per_s"]
    return rows


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rollouts: does it run?")
    quick = parser.parse_args().quick
    facts = facts_of_run(COMMAND, "aiohttp", "msgspec")
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), quick=quick)
    if not quick:
        page = [NOTE, table(HEAD, [as_cells(row) for row in rows])]
        write_results("rollouts", "\n".join(page), facts, rows)


if __name__ == "__main__":
    main()
