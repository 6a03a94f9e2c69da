"""Entries that are the same in every process, from tasks that do not see to it themselves.

Some walk over sets of text, which Python orders by a seed that is new in each process; some draw
from the random numbers that all of a process shares. Their entries are made in a process of its
own, where both are fixed.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telescope_core.errors import EnvironmentLoadError

UNSTEADY = frozenset(
    {
        "codeio",
        "isomorphic_strings",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
    }
)
BATCH = 100
"""Entries per process, which takes seconds to start."""
_MOST = 10 * BATCH
_TIME_LIMIT_S = 300.0
_PROGRAM = """
import itertools, json, pickle, random, sys, warnings
import numpy
warnings.simplefilter("ignore")
from reasoning_gym.factory import create_dataset
about = json.loads(sys.argv[1])
random.seed(about["seed"])
numpy.random.seed(about["seed"])
dataset = create_dataset(about["task"], seed=about["seed"], size=about["most"], **about["options"])

def is_steady(index):
    # What a clock decides differs at once. Programs that need scipy give nothing without it.
    entry = dataset[index]
    return entry == dataset[index] and "scipy" not in entry["question"]

steady = (dataset[index] for index in range(about["most"]) if is_steady(index))
entries = list(itertools.islice(steady, about["size"]))
assert len(entries) == about["size"], f"only {len(entries)} entries are the same twice"
open(sys.argv[2], "wb").write(pickle.dumps(entries))
"""


def generated(task: str, options: Mapping[str, Any], *, seed: int) -> list[Mapping[str, Any]]:
    """Return the `BATCH` entries of `task` for `seed`."""
    about = json.dumps(
        {"task": task, "seed": seed, "size": BATCH, "most": _MOST, "options": dict(options)}
    )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "entries"
        finished = subprocess.run(
            [sys.executable, "-c", _PROGRAM, about, str(target)],
            env={**os.environ, "PYTHONHASHSEED": "0"},
            stdout=subprocess.DEVNULL,  # some tasks print
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
        if finished.returncode:
            lines = finished.stderr.strip().splitlines() or ["no message"]
            raise EnvironmentLoadError(
                f"task {task} of reasoning-gym cannot make its questions: {lines[-1]}"
            )
        return pickle.loads(target.read_bytes())
