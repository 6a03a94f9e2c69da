"""Running `dataset_program` against fixture rows: over a loopback Hub, or with none."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "packages/telescope-envs/environments"

KINDS = ("gold", "empty", "echo", "other", "form", "form_of_line", "junk")
"""The answers that `dataset_program` can give."""


def run_cases(
    cases: list, variables: dict[str, str], *, hash_seed: int = 1, kinds: tuple[str, ...] = ()
) -> list[dict]:
    """Return what a process saw of each case; rewards of answers of `kinds`, which take longer."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    program = [sys.executable, "-m", "tests.environments.dataset_program"]
    finished = subprocess.run(
        [*program, json.dumps(cases), json.dumps(kinds)],
        env={**environ, "PYTHONHASHSEED": str(hash_seed), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def same_in_another_process(
    cases: list, variables: dict[str, str]
) -> tuple[list[dict], list[dict]]:
    """Return what two processes saw whose hashes differ: the first one answers, the other reads."""
    first = run_cases(cases, variables, kinds=KINDS)
    return first, run_cases(cases, variables, hash_seed=2)


def unplayed(told: dict) -> dict:
    """Return what a process told of a case, without what answers earned."""
    splits = {
        split: [{**one, "earned": {}} for one in found] for split, found in told["splits"].items()
    }
    return {**told, "splits": splits}
