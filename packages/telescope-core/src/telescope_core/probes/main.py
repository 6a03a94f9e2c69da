"""The program of a probe: reads its job, runs it, and writes the results."""

import asyncio
import os
from pathlib import Path

from telescope_core.finding.locate import load_environment_class
from telescope_core.probes.answers import Answers, Job
from telescope_core.probes.guards import cut_off_network, end_with_parent
from telescope_core.probes.leakage import look_for_leaks
from telescope_core.probes.load import run_load
from telescope_core.probes.near_gold import run_near_gold
from telescope_core.probes.reward import run_reward, score_again

_RUNS = {"load": run_load, "reward": run_reward}
_PLAYS = {"scores": score_again, "leakage": look_for_leaks, "grading": run_near_gold}
"""Kinds that need only a built environment."""


def main(text: str) -> None:
    """Run the job in `text`; ends as soon as its supervisor does."""
    job = Job.read(text)
    end_with_parent(os.getppid())
    answers = Answers(Path(job.output))
    if job.kind in _RUNS:
        _RUNS[job.kind](job, answers)
    else:
        if job.cuts_network:
            cut_off_network()
        environment = load_environment_class(job.factory).from_settings(job.settings)
        asyncio.run(_PLAYS[job.kind](environment, job.num_examples, answers))
    answers.close()
