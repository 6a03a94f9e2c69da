"""Running `dataset_program` against fixture rows: over a loopback Hub, or with none."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "packages/telescope-envs/environments"


def run_cases(cases: list, variables: dict[str, str], *, hash_seed: int = 1) -> list[dict]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    finished = subprocess.run(
        [sys.executable, "-m", "tests.environments.dataset_program", json.dumps(cases)],
        env={**environ, "PYTHONHASHSEED": str(hash_seed), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
