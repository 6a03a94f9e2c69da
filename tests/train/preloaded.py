"""Imports once what ranks need, and runs the `main` of programs in forks.

Each line of stdin is a JSON list: a file for what a program prints, the program, its arguments. Two
lines of stdout answer it: the process of the program, which leads a group of its own, and then its
exit code.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import backend_cases  # noqa: F401
from forked_ranks import imported

import telescope_train.trainer.worker  # noqa: F401


def main() -> None:
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        output, *words = json.loads(line)
        process = os.fork()
        if process == 0:
            run(output, words)
        print(process, file=answers, flush=True)
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run(output: str, words: list[str]) -> NoReturn:
    """Run a program in this process, which was forked for it, and end it."""
    os.setsid()
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = words
    code = 1
    try:
        imported(Path(words[0])).main()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # An ordinary end would print what libraries leak, which is longer than what has failed.
        os._exit(code)


if __name__ == "__main__":
    main()
