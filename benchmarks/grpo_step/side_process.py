"""One side of a benchmark as a process of its own, whose output goes to a log."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent


def run_side(
    module: str,
    arguments: list[str],
    *,
    label: str,
    log_path: Path,
    threads: str,
    deadline_s: float,
) -> None:
    """Run `python -m module arguments`; SystemExit with the end of its log if it fails.

    `threads`: of OpenMP.
    """
    with log_path.open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=BENCHMARKS,
            env={**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"{label} failed; {log_path} ends:\n{log_path.read_text()[-2000:]}")
