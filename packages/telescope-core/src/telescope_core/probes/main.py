"""The program of a probe: reads its job, runs it, and writes the results."""

import os
from pathlib import Path

from telescope_core.probes.answers import Answers
from telescope_core.probes.guards import end_with_parent
from telescope_core.probes.job import Job
from telescope_core.probes.leakage import run_leakage
from telescope_core.probes.load import run_load
from telescope_core.probes.near_gold import run_grading
from telescope_core.probes.reward import run_reward, run_scores

_RUNS = {
    "load": run_load,
    "reward": run_reward,
    "scores": run_scores,
    "leakage": run_leakage,
    "grading": run_grading,
}


def main(text: str) -> None:
    """Run the job in `text`; ends as soon as its supervisor does."""
    job = Job.read(text)
    end_with_parent(os.getppid())
    answers = Answers(Path(job.output))
    _RUNS[job.kind](job, answers)
    answers.close()
