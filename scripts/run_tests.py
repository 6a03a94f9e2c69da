"""Runs tests in a few plain pytest processes side by side, and says what took long.

    scripts/run_tests.py fast                    what make test-fast runs
    scripts/run_tests.py fast slow engine        what make test runs
    scripts/run_tests.py nightly --workers 4     the rest, in four processes

A batch is one pytest process: the tests of one kind in some folders. Folders that import the same
libraries, or that share a server, are in one batch, so that each is imported and started once.
Every batch runs even where an earlier one failed. The exit code is 1 if a test failed, else 0.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
KINDS = ("slow", "engine", "nightly", "gpu")
"""Marks of tests; a test without one is fast. One with several is of the last of them."""
PARTS = {
    "fast": "not slow and not engine and not nightly and not gpu",
    "slow": "slow and not engine and not nightly and not gpu",
    "engine": "engine and not nightly and not gpu",
    "nightly": "nightly and not gpu",
}
GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "fast": (("train", "cli", "contracts", "docs", "environments"),),
    "slow": (("envs",), ("train",), ("adapters", "environments"), ("core", "docs")),
    "engine": (("e2e",), ("train",)),
    "nightly": (("e2e",), ("train",), ("envs",)),
}
"""Folders of `tests` that one batch takes, for each part; one more batch takes the rest."""
OF_CHECK = {"arch"}
"""Folders that no batch takes, since `make check` runs their tests."""
LIMITS_S = {"fast": 600, "slow": 1200, "engine": 1200, "nightly": 3000}
"""Seconds after which a test fails. One that hangs is told before somebody stops the whole run for
its length, and none comes near it because of what its neighbors compute."""
NO_TESTS = 5
"""What pytest returns if no test was of that kind."""
FAILURE = ("FAILED tests/", "ERROR tests/")
"""How the lines begin that name a failed test: as it fails, and at the end with what it raised."""


@dataclass(kw_only=True)
class Batch:
    """One pytest process: what it runs, and what came of it."""

    part: str
    folders: tuple[str, ...]
    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of its process and of those that it started and waited for."""
    exit_code: int = 0
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The part and its folders, as the lines of the output begin; no two batches share one."""
        first, *more = self.folders
        return f"{self.part} {first}" + (f" and {len(more)} more" if more else "")


def batches_of(part: str) -> list[Batch]:
    """Return the batches of `part`: they take every folder of `tests` once but those of check."""
    left = {path.name for path in TESTS.iterdir() if any(path.rglob("test_*.py"))} - OF_CHECK
    batches = []
    for group in (*GROUPS[part], tuple(sorted(left))):
        folders = tuple(name for name in group if name in left)
        left -= set(folders)
        if folders:
            batches.append(Batch(part=part, folders=folders))
    return batches


def run(batch: Batch, *, lane: int, times: Path, extra: list[str]) -> None:
    """Run one batch, and print its lines as they come, each after the name of the batch."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "TELESCOPE_TEST_TIMES": str(times / f"{batch.name}.jsonl"),
        "TELESCOPE_TEST_LANE": str(lane),
    }
    command = [
        *(sys.executable, "-m", "pytest", "-m", PARTS[batch.part]),
        *(f"--timeout={LIMITS_S[batch.part]}", *extra),
        *(f"tests/{folder}" for folder in batch.folders),
    ]
    batch.began_s = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{batch.name} | {line.rstrip()}", flush=True)
            if line.startswith(FAILURE):
                batch.failures[line.split()[1]] = line.rstrip()
        _, status, spent = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    batch.ended_s, batch.cpu_s = time.monotonic(), spent.ru_utime + spent.ru_stime
    batch.exit_code = process.returncode


def run_all(batches: list[Batch], *, workers: int, times: Path, extra: list[str]) -> None:
    """Run all batches, in their order, as many at once as there are workers."""
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for lane in range(workers):
        free.put(lane)

    def run_in_free_lane(batch: Batch) -> None:
        lane = free.get()
        run(batch, lane=lane, times=times, extra=extra)
        free.put(lane)

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(run_in_free_lane, batches))
        except KeyboardInterrupt:
            # The terminal has told the processes as well; each says how far it came, and ends.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def summary(batches: list[Batch], times: Path) -> list[str]:
    """Return the seconds of each part and batch, the slowest tests, and last those that failed."""
    lines = [f"{'seconds':>8}  {'of cpu':>8}  tests  batch"]
    tests: list[tuple[float, str]] = []
    for batch in batches:
        path = times / f"{batch.name}.jsonl"
        written = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in written]
        tests += [(row["seconds"], row["test"]) for row in rows]
        outcome = "" if batch.exit_code in (0, NO_TESTS) else f"  FAILED ({batch.exit_code})"
        seconds = batch.ended_s - batch.began_s
        lines.append(f"{seconds:8.1f}  {batch.cpu_s:8.1f}  {len(rows):5}  {batch.name}{outcome}")
    if batches:
        whole_s = max(b.ended_s for b in batches) - min(b.began_s for b in batches)
        cpu_s = sum(batch.cpu_s for batch in batches)
        lines.append(f"{whole_s:8.1f}  {cpu_s:8.1f}  {len(tests):5}  in all, side by side")
    lines += ["", "the 20 slowest tests, with the fixtures that they were the first to need:"]
    lines += [f"{seconds:8.1f}  {name}" for seconds, name in sorted(tests, reverse=True)[:20]]
    # At the very end, where whoever sees only the last lines of a long output finds them.
    failures = [failure for batch in batches for failure in batch.failures.values()]
    return [*lines, "", *failures] if failures else lines


def main() -> int:
    """Run the parts that are named; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--workers", type=int, default=3, help="processes at once (default: 3)")
    asked, extra = parser.parse_known_args()
    if asked.workers < 1:
        parser.error(f"--workers must be at least 1, got {asked.workers}")
    batches = [batch for part in asked.parts for batch in batches_of(part)]
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder)
        try:
            run_all(batches, workers=asked.workers, times=times, extra=extra)
        except KeyboardInterrupt:
            return 130
        finally:
            ran = [batch for batch in batches if batch.ended_s]
            print("\n" + "\n".join(summary(ran, times)), flush=True)
    return int(any(batch.exit_code not in (0, NO_TESTS) for batch in batches))


if __name__ == "__main__":
    sys.exit(main())
