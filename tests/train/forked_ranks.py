"""Runs the `main` of a script once per rank, each in a fork: the script is imported once for all.

usage: forked_ranks.py SCRIPT WORLD_SIZE PORT JOB_FILE

Each rank has the arguments RANK WORLD_SIZE PORT JOB_FILE. What rank R says goes to ranks/R.txt
beside the job file; the exit codes go to ranks/codes.json, a signal as its negative number.
"""

import gc
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType

FORK = multiprocessing.get_context("fork")


def main() -> None:
    script, world_size, port, job_file = sys.argv[1:]
    folder = Path(job_file).parent / "ranks"
    folder.mkdir()
    module = imported(Path(script))
    gc.collect()
    gc.freeze()
    ranks = []
    for rank in range(int(world_size)):
        arguments = [script, str(rank), world_size, port, job_file]
        said = folder / f"{rank}.txt"
        ranks.append(FORK.Process(target=run, args=(module, arguments, said)))
        ranks[-1].start()
    for rank in ranks:
        rank.join()
    (folder / "codes.json").write_text(json.dumps([rank.exitcode for rank in ranks]))


def imported(script: Path) -> ModuleType:
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, arguments: list[str], said: Path) -> None:
    with said.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = arguments
    module.main()


if __name__ == "__main__":
    main()
