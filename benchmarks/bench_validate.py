"""`telescope env validate` of math-reasoning, level by level, beside a naive sequential runner.

The runner does the same checks with the same machinery, one process for each check, one after the
other, rollouts one at a time: what a test file with one test per check does when each test has to
be safe from the others. The limit of the project is 30 s for the whole command.
Run: python benchmarks/bench_validate.py
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import facts_of_run, table, write_results

from telescope_core.probes.completions import CHECK_OF_KIND
from telescope_envs.validation import CHECKS, Level, Verdict, validate_project
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.processes import (
    ProbePlace,
    Subject,
    Task,
    make_job,
    prepare_place,
    run_together,
)
from telescope_envs.validation.static import check_static

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "packages" / "telescope-envs" / "environments" / "math-reasoning"
NUM_EXAMPLES, REPEATS, LIMIT_S = 16, 3, 30.0
COMMAND = "OMP_NUM_THREADS=1 python benchmarks/bench_validate.py"
NOTE = """# Validating math-reasoning

{facts}

Whole command and levels in seconds, medians; project folder, all levels, 16 examples of each split.
The naive runner plays the same answers, with a process for each check.
"""
PLAY = """
import asyncio, sys
sys.path[:0] = [sys.argv[1]]
from telescope_core.finding.locate import load_environment_class
from telescope_core.probes.completions import tries_of
from telescope_core.probes.meter import Limits, Meter
from telescope_core.probes.playing import asked_of, play_in_turn

async def main():
    environment = load_environment_class(sys.argv[2]).from_settings({})
    asked = await asked_of(environment, int(sys.argv[3]))
    kinds = set(sys.argv[4].split(",")) if sys.argv[4] else None
    tries = [one for one in tries_of(asked) if kinds is None or one.kind in kinds]
    for _ in range(int(sys.argv[5])):
        await play_in_turn(environment, tries, Meter(), Limits(own_s=600, wall_s=600))
    await environment.close()

asyncio.run(main())
"""
REPEATED = {"reward.deterministic": 2, "reward.concurrency": 2, "reward.same_in_processes": 2}


def ours() -> dict[str, float]:
    """Return the seconds of each level, and of everything."""
    started_s = time.perf_counter()
    report = validate_project(PROJECT)
    total = time.perf_counter() - started_s
    assert report.verdict is Verdict.PASS, report.checks
    return {**{level: float(report.facts[f"{level}_s"]) for level in Level}, "all": total}


def naive() -> dict[str, float]:
    """Return the same, of the naive runner."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        started_s = begun_s = time.perf_counter()
        subject = check_static(Subject(label="", project=PROJECT), Findings())
        place = prepare_place(subject, Path(scratch), Findings())
        assert place is not None
        for level in Level:
            for check in CHECKS.values():
                if check.level is level and level is not Level.STATIC:
                    naive_check(check.id, place, subject.factory)
            seconds[level] = time.perf_counter() - begun_s
            begun_s = time.perf_counter()
        seconds["all"] = time.perf_counter() - started_s
    return seconds


def naive_check(check: str, place: ProbePlace, factory: str) -> None:
    """Do one check in a process of its own."""
    if not check.startswith("reward."):
        kind = "load" if check.startswith("load.") else "leakage"
        if "tool" in check or check == "leakage.cleanup":
            return  # it has none
        job = make_job(place, kind, factory, NUM_EXAMPLES, cuts_network=True)
        run_together(place, [Task(job=job, limit_s=600)])
        return
    kinds = [kind for kind, name in CHECK_OF_KIND.items() if name == check]
    kinds += ["gold"] if check in ("reward.gold", "reward.has_gold") else []
    arguments = [place.search_path[0], factory, str(NUM_EXAMPLES), ",".join(kinds)]
    command = [sys.executable, "-c", PLAY, *arguments, str(REPEATED.get(check, 1))]
    subprocess.run(command, check=True)


def main() -> None:
    """Measure, print and write the results."""
    facts = facts_of_run(COMMAND, "telescope-envs", "math-verify")
    facts |= {"examples": NUM_EXAMPLES, "repeats": REPEATS, "limit_s": LIMIT_S}
    # Taking turns, so that a busy machine is as busy for both.
    fast, slow = zip(*((ours(), naive()) for _ in range(REPEATS)), strict=True)
    rows = []
    for name in fast[0]:
        mine, theirs = (statistics.median(run[name] for run in runs) for runs in (fast, slow))
        rows.append({"level": name, "telescope_s": mine, "naive_s": theirs})
    cells = [
        [
            row["level"],
            f"{row['telescope_s']:.2f}",
            f"{row['naive_s']:.2f}",
            f"{row['naive_s'] / row['telescope_s']:.1f}x",
        ]
        for row in rows
    ]
    page = table(["level", "telescope", "naive", "ratio"], cells)
    verdict = "within" if rows[-1]["telescope_s"] < LIMIT_S else "ABOVE"
    print(page, f"\nall levels: {rows[-1]['telescope_s']:.1f} s, {verdict} {LIMIT_S:g} s")
    write_results("validate", f"{NOTE}\n{page}", facts, rows)


if __name__ == "__main__":
    main()
