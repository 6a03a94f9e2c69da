"""Ranks as processes of their own, which meet at a port of this machine."""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.ports import free_port

RANK_SCRIPT = Path(__file__).parent / "rank_script.py"
FORKED_RANKS = Path(__file__).parent / "forked_ranks.py"
PRELOADED = Path(__file__).parent / "preloaded.py"


def run_ranks(world_size, job, folder, *, script, wait_s=180) -> None:
    """Run `script` once per rank and require that all succeed; all are gone when this returns."""
    codes, said = end_ranks(world_size, job, folder, script=script, wait_s=wait_s)
    for code, text in zip(codes, said, strict=True):
        assert code == 0, text[-3000:]


def end_ranks(world_size, job, folder, *, script, wait_s=180) -> tuple[list[int], list[str]]:
    """Run `script` once per rank; returns exit codes and outputs. All are gone then."""
    job_file = folder / "job.json"
    job_file.write_text(json.dumps({**job, "output": str(folder)}))
    arguments = [str(script), str(world_size), str(free_port()), str(job_file)]
    output = _end([str(FORKED_RANKS), *arguments], folder, wait_s=wait_s)
    codes = folder / "ranks" / "codes.json"
    assert codes.exists(), output[-3000:]
    said = [(folder / "ranks" / f"{rank}.txt").read_text() for rank in range(world_size)]
    return json.loads(codes.read_text()), said


def run_jobs(jobs, folder) -> None:
    """Run jobs of the rank script one after the other; every process is gone after it."""
    for job in jobs:
        Path(job["output"]).mkdir(exist_ok=True)
        job["port"] = free_port()
    job_file = folder / "jobs.json"
    job_file.write_text(json.dumps(jobs))
    _end([str(RANK_SCRIPT), str(job_file)], folder, wait_s=2900)


@cache
def _preloaded() -> subprocess.Popen[bytes]:
    """Return the process that has imported what ranks need; it ends with this one."""
    process = subprocess.Popen(
        [sys.executable, str(PRELOADED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    # It has no other input than the lines of this process.
    atexit.register(process.communicate)
    return process


def _end(words, folder, *, wait_s) -> str:
    """Run a script that forks ranks, which has to succeed; returns what it printed."""
    output = folder / "output.txt"
    process = _preloaded()
    assert process.stdin is not None
    process.stdin.write(json.dumps([str(output), *words]).encode() + b"\n")
    ranks = int(_answer(process, wait_s))
    try:
        code = int(_answer(process, wait_s))
    except TimeoutError:
        os.killpg(ranks, signal.SIGKILL)
        code = int(_answer(process, wait_s))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks, signal.SIGKILL)
    said = output.read_text(errors="replace")
    assert code == 0, said[-3000:]
    return said


def _answer(process, wait_s) -> bytes:
    if not select.select([process.stdout], [], [], wait_s)[0]:
        raise TimeoutError(f"no answer of the ranks in {wait_s} s")
    return process.stdout.readline()
