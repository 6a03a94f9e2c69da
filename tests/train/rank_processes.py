"""Ranks as processes of their own, which meet at a port of this machine."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.ports import free_port

RANK_SCRIPT = Path(__file__).parent / "rank_script.py"


def run_ranks(world_size, job, folder, *, script, wait_s=180) -> None:
    """Run `script` once per rank and require that all succeed; all are gone when this returns."""
    codes, said = end_ranks(world_size, job, folder, script=script, wait_s=wait_s)
    for code, text in zip(codes, said, strict=True):
        assert code == 0, text[-3000:]


def end_ranks(world_size, job, folder, *, script, wait_s=180) -> tuple[list[int], list[str]]:
    """Run `script` once per rank; returns exit codes and outputs. All are gone then."""
    job_file = folder / "job.json"
    job_file.write_text(json.dumps({**job, "output": str(folder)}))
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world_size), str(port), str(job_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=wait_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], said


def run_jobs(jobs, folder) -> None:
    """Run jobs of the rank script one after the other; every process is gone after it."""
    for job in jobs:
        Path(job["output"]).mkdir(exist_ok=True)
        job["port"] = free_port()
    job_file = folder / "jobs.json"
    job_file.write_text(json.dumps(jobs))
    with subprocess.Popen(
        [sys.executable, str(RANK_SCRIPT), str(job_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as ranks:
        try:
            output, _ = ranks.communicate(timeout=2900)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
        assert ranks.returncode == 0, output[-3000:]
