"""Environments of other frameworks: rollouts per second and rewards, their own loop beside ours.

Each framework has a virtual environment of its own, as `telescope env link` makes it. Both sides
play the same examples with the same replies in one process, in turns; a model is not asked.
Run: python benchmarks/bench_adapters.py
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from machine import facts_of_run, table, write_results

from telescope_envs.install.adapted import environment_for

COMMAND = "python benchmarks/bench_adapters.py"
TESTS = Path(__file__).parents[1] / "tests" / "adapters"
PLAYS = Path(__file__).parent / "adapters" / "plays.py"
ROLLOUTS = 60
ROUNDS = 3
TASKS = str(TESTS / "inspect_tasks.py")
FRAMEWORKS = {
    "gymnasium": (["gymnasium==1.4.0"], ""),
    "textarena": (["textarena==0.7.4"], ""),
    "verifiers": (["verifiers==0.3.1", str(TESTS / "verifiers_sums")], ""),
    "verifiers-0.4": (["verifiers==0.4.0", str(TESTS / "verifiers_tasks")], ""),
    "openenv": (["openenv==0.10.0"], str(TESTS / "openenv_servers.py")),
    "inspect": (["inspect-ai==0.3.285"], TASKS),
}
NOTE = """# Environments of other frameworks

Rollouts per second, the median of rounds in which both sides take turns in one process, 16
rollouts at a time; replies come from a script. Theirs is the framework's own loop: its environment
stepped in threads (gymnasium, textarena), its rollout and rubric (verifiers), its episodes through
its interception server, which each round starts, and a program that asks once (verifiers 0.4), its
client over a WebSocket to a server of its own in another process (openenv), its whole eval
(inspect, which has no smaller loop). Ours plays the same through the adapter, with everything that
is recorded of a rollout. The last column says whether all rewards were the same.

{facts}
"""


def measured(name: str, number: int) -> dict[str, Any]:
    """Return what `plays.py` measured with a framework."""
    wanted, path = FRAMEWORKS[name]
    python = str(environment_for(name.partition("-")[0], wanted).python)
    words = [python, str(PLAYS), name, str(number), str(ROUNDS), *([path] if path else [])]
    done = subprocess.run(
        words, env={**os.environ, "INSPECT_DISPLAY": "none"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    number = parser.parse_args().rollouts
    rows, results = [], []
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("TELESCOPE_HOME", home)
        for name in FRAMEWORKS:
            found = measured(name, number)
            theirs, ours = (statistics.median(found[side]["rates"]) for side in ("theirs", "ours"))
            is_same = found["theirs"]["rewards"] == found["ours"]["rewards"]
            rows.append(
                [name, f"{theirs:.0f}", f"{ours:.0f}", f"{ours / theirs:.2f}", str(is_same)]
            )
            results.append({"framework": name, "same_rewards": is_same, **found})
            print(rows[-1], flush=True)
    text = table(["framework", "theirs/s", "ours/s", "ours to theirs", "same rewards"], rows)
    print(text)
    write_results("adapters", f"{NOTE}\n{text}", facts_of_run(COMMAND, "telescope-core"), results)
    assert all(one["same_rewards"] for one in results), "rewards differ"


if __name__ == "__main__":
    main()
