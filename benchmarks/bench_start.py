"""Processor time of a start: imports of telescope-core, and the command's help and list.

Each is compared with what it cannot do without: Python and the libraries that it loads. Time of the
processor, because time of the wall also measures the neighbors. The least of many starts is told.

usage: bench_start.py [--runs N]
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

from machine import facts_of_run, table, write_results

TELESCOPE = str(Path(sys.executable).parent / "telescope")
PYDANTIC = "import asyncio, inspect, ssl; from pydantic import BaseModel; BaseModel.model_dump"
STARTS = {
    "import telescope_core": ([sys.executable, "-c", "import telescope_core"], "pass", 0.3),
    "from telescope_core import *": (
        [sys.executable, "-c", "from telescope_core import *"],
        PYDANTIC,
        None,
    ),
    "telescope --help": ([TELESCOPE, "--help"], "import typer", 0.25),
    "telescope env list": ([TELESCOPE, "env", "list"], "import typer", None),
}
"""Name -> the command, what it is compared with, and its limit in seconds."""
PAGE = """# Processor time of a start

{facts}

"""


def least_cpu_s(command: list[str], runs: int) -> float:
    """Return the least processor time of `runs` runs, in seconds."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(runs):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        user_s, system_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        seconds.append(user_s + system_s)
    return min(seconds)


def main() -> None:
    """Start each of them many times and write the least."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=12)
    runs = parser.parse_args().runs
    rows, shown, slow = [], [], []
    for name, (command, libraries, limit_s) in STARTS.items():
        ours_s = least_cpu_s(command, runs)
        theirs_s = least_cpu_s([sys.executable, "-c", libraries], runs)
        rows.append({"name": name, "ours_s": ours_s, "libraries_s": theirs_s, "limit_s": limit_s})
        limit = "" if limit_s is None else f"{limit_s:.2f}"
        shown.append([name, f"{ours_s:.3f}", f"{theirs_s:.3f}", f"{ours_s / theirs_s:.1f}", limit])
        if limit_s is not None and ours_s >= limit_s:
            slow.append(name)
    head = ["start", "seconds", "its libraries alone, s", "ratio", "limit, s"]
    print(table(head, shown))
    facts = facts_of_run(f"benchmarks/bench_start.py --runs {runs}", "pydantic", "typer")
    write_results("start", PAGE + table(head, shown), facts, rows)
    if slow:
        raise SystemExit(f"slower than its limit: {', '.join(slow)}")


if __name__ == "__main__":
    main()
